"""Prints a model's text as it streams. On a terminal, control characters are shown, not executed."""

from __future__ import annotations

import sys
import unicodedata


def print_piece(text: str) -> None:
    """Print without a line end and flush. A file or a pipe gets the text unchanged."""
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)


def harmless(text: str) -> str:
    """The text with every control character but newline and tab replaced: no escape sequence survives."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char
        for char in text
    )
