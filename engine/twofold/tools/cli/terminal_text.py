"""Text for terminals: a model's text as it streams, without control characters; tables and ranges of numbers."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence


def print_piece(text: str) -> None:
    """Print without a line end and flush. A file or a pipe gets the text unchanged."""
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)


def harmless(text: str) -> str:
    """The text with every control character but newline and tab replaced: no escape sequence survives."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char
        for char in text
    )


def ranges(numbers: Sequence[int], separator: str = " ") -> str:
    """Ascending numbers as "0-3 7 9-11"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return separator.join("-".join(map(str, part)) for part in parts)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as narrow as possible; numbers right-aligned."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[n]) for row in [list(head), *texts]) for n in range(len(head))]
    is_number = [
        bool(rows) and all(isinstance(row[n], int | float) for row in rows) for n in range(len(head))
    ]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, is_number, strict=True)
        ).rstrip()

    return [line(head), *map(line, texts)]


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
