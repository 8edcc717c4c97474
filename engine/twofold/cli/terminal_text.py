"""Prints a model's text as it comes. On a terminal, control characters are shown, not obeyed."""

from __future__ import annotations

import sys
import unicodedata


def print_piece(text: str) -> None:
    """Print without a line end, at once. A file or a pipe gets the text as it is."""
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)


def harmless(text: str) -> str:
    """The text with every control character but newline and tab replaced: no escape sequence survives."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char
        for char in text
    )
