"""The one parser of answers' Markdown: CommonMark with tables and strikethrough; HTML stays text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_CHARS: Final = 256 * 1024
"""Longest text that is parsed; callers show a longer one as it is."""


@cache
def parser() -> MarkdownIt:
    """The parser. A line end in a paragraph is a line break, as models write verse and addresses."""
    options = {"html": False, "breaks": True, "maxNesting": 20}
    return MarkdownIt("commonmark", options).enable(["table", "strikethrough"])


def blocks(text: str, env: dict[str, Any]) -> Iterator[tuple[int, list[Token]]]:
    """Top-level blocks of `text` in order: the block's first line, and its tokens. env: the parser's state.

    While a text grows at its end, every block but the last stays as it is.
    """
    begin = 0
    tokens = parser().parse(text, env)
    for at, token in enumerate(tokens):
        if token.level == 0 and token.nesting <= 0:
            lines = tokens[begin].map
            yield lines[0] if lines else 0, tokens[begin : at + 1]
            begin = at + 1
