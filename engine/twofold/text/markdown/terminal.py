"""Markdown as lines for a terminal, each at most `width` columns wide; styles are ANSI sequences."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from markdown_it.token import Token

from twofold.text.markdown.parsing import blocks

_RESET: Final = "\x1b[0m"
_BOLD, _DIM, _ITALIC, _UNDERLINE, _STRUCK, _CODE = "1", "2", "3", "4", "9", "36"
_OPENS: Final = {"strong_open": _BOLD, "em_open": _ITALIC, "s_open": _STRUCK, "link_open": _UNDERLINE}
_CLOSES: Final = frozenset(name.replace("_open", "_close") for name in _OPENS)
_PARTS: Final = re.compile(r"\n|[^\S\n]+|\S+")


class Span(NamedTuple):
    """Text of one style."""

    text: str
    style: str = ""
    """Parameters of an SGR sequence, joined by ";"."""


def terminal_blocks(text: str, width: int, *, styled: bool = True) -> list[tuple[int, list[str]]]:
    """The top-level blocks of `text`: the first line of each in the text, and its lines on the terminal, which begin
    with an empty one for all but the first. Text must hold no control characters."""
    found: list[tuple[int, list[str]]] = []
    for line, tokens in blocks(text, {}):
        writer = _Writer(width, styled)
        writer.write(tokens)
        found.append((line, ["", *writer.lines] if found else writer.lines))
    return found


class _Writer:
    """Writes one top-level block."""

    def __init__(self, width: int, styled: bool) -> None:
        self.lines: list[str] = []
        self._width = max(16, width)
        self._styled = styled
        self._indents: list[str] = []
        """Before each line, by container."""
        self._mark = ""
        """Mark of a list item whose first line was not written yet."""
        self._numbers: list[int | None] = []
        self._style = ""

    def write(self, tokens: Sequence[Token]) -> None:
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if token.type == "table_open":
                end = next(n for n in range(at, len(tokens)) if tokens[n].type == "table_close")
                self._write_table(tokens[at:end])
                at = end
            else:
                self._write_token(token)
            at += 1

    def _write_token(self, token: Token) -> None:
        kind = token.type
        if kind == "inline":
            self._wrapped(_spans(token.children or [], self._style))
        elif kind in ("fence", "code_block"):
            for line in token.content.rstrip("\n").split("\n"):
                self._cut(f"  {line.expandtabs(4)}", _CODE)
        elif kind == "hr":
            self._cut("─" * min(40, self._width), _DIM)
        elif kind == "heading_open":
            self._style = f"{_BOLD};{_UNDERLINE}" if token.tag == "h1" else _BOLD
        elif kind == "heading_close":
            self._style = ""
        elif kind == "blockquote_open":
            self._indents.append("▌ ")
        elif kind in ("bullet_list_open", "ordered_list_open"):
            start = token.attrs.get("start", 1)
            self._numbers.append(int(start) if kind == "ordered_list_open" else None)
        elif kind in ("bullet_list_close", "ordered_list_close"):
            self._numbers.pop()
        elif kind == "list_item_open":
            number = self._numbers[-1]
            self._mark = "• " if number is None else f"{number}. "
            self._numbers[-1] = None if number is None else number + 1
            self._indents.append(" " * len(self._mark))
        elif kind in ("blockquote_close", "list_item_close"):
            if self._mark:
                self._add([])  # an empty item
            self._indents.pop()

    def _wrapped(self, spans: Iterable[Span]) -> None:
        for line in _wrap(spans, self._room):
            self._add(line)

    def _cut(self, text: str, style: str) -> None:
        """Add a line whose spaces count, cut into as many as needed."""
        for line in _cut(text, self._room):
            self._add([Span(line, style)])

    @property
    def _room(self) -> int:
        return max(8, self._width - sum(map(len, self._indents)))

    def _add(self, line: Iterable[Span]) -> None:
        indents = self._indents
        if self._mark:
            indents = [*indents[:-1], self._mark]
            self._mark = ""
        self.lines.append("".join(indents) + "".join(self._shown(span) for span in line))

    def _shown(self, span: Span) -> str:
        return f"\x1b[{span.style}m{span.text}{_RESET}" if self._styled and span.style else span.text

    def _write_table(self, tokens: Sequence[Token]) -> None:
        """Columns as wide as their cells; a table wider than the terminal is written row by row."""
        rows: list[list[list[Span]]] = []
        for token in tokens:
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                rows[-1].append(list(_spans(token.children or [], "" if len(rows) > 1 else _BOLD)))
        widths = [max(_columns(cell) for cell in column) for column in zip(*rows, strict=False)]
        if sum(widths) + 3 * (len(widths) - 1) > self._room:
            for row in rows:
                self._wrapped(span for cell in row for span in (*cell, Span(" | ")))
            return
        for number, row in enumerate(rows):
            line = [
                span
                for cell, width in zip(row, widths, strict=False)
                for span in (*cell, Span(" " * (width - _columns(cell)) + " │ "))
            ]
            self._add([*line[:-1], Span(line[-1].text.removesuffix(" │ "))])
            if not number:
                self._add([Span("─┼─".join("─" * width for width in widths), _DIM)])


def _spans(children: Sequence[Token], style: str) -> Iterator[Span]:
    """The text of a paragraph, heading or cell."""
    styles = [style]
    targets: list[tuple[str, str]] = []
    text = ""
    for token in children:
        kind = token.type
        if kind in _OPENS:
            styles.append(_joined(styles[-1], _OPENS[kind]))
            if kind == "link_open":
                targets.append((str(token.attrs["href"]), text))
        elif kind in _CLOSES:
            styles.pop()
            if kind == "link_close":
                target, before = targets.pop()
                if text[len(before) :] != target:
                    yield Span(f" ({target})", _joined(styles[-1], _DIM))
        elif kind == "code_inline":
            text += token.content
            yield Span(token.content, _joined(styles[-1], _CODE))
        elif kind == "image":
            yield Span(f"{token.content or 'picture'} ({token.attrs['src']})", styles[-1])
        else:
            shown = "\n" if kind in ("softbreak", "hardbreak") else token.content
            text += shown
            yield Span(shown, styles[-1])


def _joined(*styles: str) -> str:
    return ";".join(filter(None, styles))


def _wrap(spans: Iterable[Span], width: int) -> Iterator[list[Span]]:
    """Lines broken at spaces; a word that is longer than a line is cut. Words may consist of several spans."""
    line: list[Span] = []
    column, space = 0, Span("")
    word: list[Span] = []

    def placed() -> Iterator[list[Span]]:
        """Put the word on the line; yields the lines that are full."""
        nonlocal line, column, space
        size = _columns(word)
        if line and word and column + len(space.text) + size > width:
            yield line
            line, column, space = [], 0, Span("")
        if line and word and space.text:
            line.append(space)
            column += len(space.text)
        for span in word:
            for piece in _cut(span.text, width) if size > width else [span.text]:
                if column and column + _columns([Span(piece)]) > width:
                    yield line
                    line, column = [], 0
                line.append(Span(piece, span.style))
                column += _columns([Span(piece)])
        if word:
            space = Span("")
        word.clear()

    for span in spans:
        for part in _PARTS.findall(span.text):
            if not part.isspace():
                word.append(Span(part, span.style))
                continue
            yield from placed()
            space = Span(" ", span.style)
            if part == "\n":
                yield line
                line, column, space = [], 0, Span("")
    yield from placed()
    if line:
        yield line


def _cut(text: str, width: int) -> Iterator[str]:
    """Pieces of at most `width` columns; at least one."""
    piece, column = "", 0
    for char in text:
        size = char_columns(char)
        if piece and column + size > width:
            yield piece
            piece, column = "", 0
        piece, column = piece + char, column + size
    yield piece


def _columns(spans: Iterable[Span]) -> int:
    return sum(char_columns(char) for span in spans for char in span.text)


def char_columns(char: str) -> int:
    """Columns that a terminal gives to a character."""
    if char < "\u0300":
        return 1
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
