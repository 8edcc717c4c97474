"""Reads a streamed answer as if it were complete.

Parsers are generators over a `TextReader`: they request the next characters and yield while more text must arrive.
Their result depends only on the text, not on its pieces, so that every split gives the same events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeVar

from twofold.text.chat.events import Event, EventKind

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A generator that yields while it waits for more text, and finally returns T."""

MAX_HEADER: Final = 4096
"""Most characters of a call up to its tool's name; longer ones are text."""
MAX_NAME: Final = 256
_MAX_SPACE: Final = 1024
"""A longer run of white space is text everywhere."""
_SPACE: Final = re.compile(r"\s*")
_NAME: Final = re.compile(r"[^\s<>\[\](){}\"'`,;=|\ud800-\udfff]+")


class DamagedCallError(Exception):
    """The text is not a call. Raised after the last character that could still belong to one."""


class Marks:
    """Strings to search for: the first match in the text; the longest of several at the same place."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks = tuple(sorted(marks, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        self._firsts = "".join({mark[0] for mark in self.marks})
        self._first = re.compile(f"[{re.escape(self._firsts)}]" if self.marks else r"(?!)")
        self._longest = max(map(len, self.marks), default=1)

    def find(self, text: str, at: int, closed: bool) -> tuple[int, str]:
        """(position, mark) from `at` on; (end of the part surely without a mark, "") if none is found yet."""
        match = self._pattern.search(text, at)
        partial = len(text) if closed else self._partial(text, at)
        if match is not None and (match.start() < partial):
            return match.start(), match[0]
        return partial, ""

    def _partial(self, text: str, at: int) -> int:
        """Start of a possible partial mark at the text's end."""
        begin = max(at, len(text) - self._longest + 1)
        for first in self._first.finditer(text, begin):
            rest = text[first.start() :]
            if any(len(mark) > len(rest) and mark.startswith(rest) for mark in self.marks):
                return first.start()
        return len(text)


Follow = tuple[str | re.Pattern[str], ...]
"""Strings and patterns in this order, with white space before each."""
KEY: Final = re.compile(r"[^<>\n]{1,256}")
"""A parameter's name, maybe in quotes."""


class TextReader:
    """The text received so far, the read position, and the events made so far."""

    def __init__(self, new_id: Callable[[], str], *, tools_allowed: bool = True) -> None:
        self.tools_allowed = tools_allowed
        self._new_id = new_id
        self._text = ""
        self._at = 0
        self._emitted = 0
        """Length of the text that is already in events."""
        self._closed = False
        self._cuts_calls = False
        self._events: list[Event] = []
        self._budget: int | None = None
        self._arguments: list[str] = []
        self._call_text: list[str] | None = None
        """Text of the call being read, once it has a name."""
        self._num_calls = 0
        self._space_is_text = False

    # Called by the driver.

    def push(self, text: str) -> None:
        self._text = self._text[self._emitted :] + text
        self._at -= self._emitted
        self._emitted = 0

    def cut_calls(self, cuts_calls: bool) -> None:
        """Whether the answer consists of calls only, of which the last may be cut off: the rest is not text."""
        self._cuts_calls = cuts_calls

    def close(self) -> None:
        """No text follows."""
        self._closed = True

    def take_events(self) -> list[Event]:
        self._emit_arguments()
        events, self._events = self._events, []
        return events

    # Called by parsers to read.

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def more(self) -> Wait[bool]:
        """Wait for more text; False at the end."""
        size = len(self._text) - self._at
        while len(self._text) - self._at <= size:
            if self._closed:
                return False
            yield
        return True

    def lookahead(self, count: int) -> Wait[str]:
        """The next `count` characters, without reading them; fewer at the end."""
        while len(self._text) - self._at < count and not self._closed:
            yield
        return self._text[self._at : self._at + count]

    def peek(self) -> Wait[str]:
        """The next character, without reading it; "" at the end. DamagedCallError if a header is too long."""
        if self._budget is not None and self._budget <= 0:
            raise DamagedCallError
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def advance(self, count: int = 1) -> str:
        """Read characters that have already arrived."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        if self._budget is not None:
            self._budget -= count
        return taken

    def take_while(
        self,
        pattern: re.Pattern[str],
        limit: int | None = None,
        write: Callable[[str], None] | None = None,
    ) -> Wait[str]:
        """Read what `pattern` (of the form [...]* or [...]+) matches, at most `limit` characters.

        With `write`, the text is passed on as it arrives instead of returned.
        """
        parts: list[str] = []
        write = write or parts.append
        left = limit
        while True:
            room = [count for count in (left, self._budget) if count is not None]
            end = min([len(self._text), *(self._at + max(0, count) for count in room)])
            match = pattern.match(self._text, self._at, end)
            if match is not None and match[0]:
                write(self.advance(len(match[0])))
                if left is not None:
                    left -= len(match[0])
            if self._at < len(self._text) or not (yield from self.more()):
                return "".join(parts)

    def skip_space(self) -> Wait[None]:
        """Skip white space."""
        yield from self.take_while(_SPACE)

    def read_name(self) -> Wait[str]:
        """Read a tool's or parameter's name. DamagedCallError if there is none."""
        name = yield from self.take_while(_NAME, MAX_NAME)
        if not name:
            raise DamagedCallError
        return name

    def expect(self, literal: str) -> Wait[None]:
        """Read `literal`. DamagedCallError at the first different character."""
        for character in literal:
            if (yield from self.peek()) != character:
                raise DamagedCallError
            self.advance()

    def accept(self, *literals: str, after_space: bool = True) -> Wait[str]:
        """Read the one of `literals` that comes next, with the space before it; "" and nothing read if none does."""
        size = 0
        if after_space:
            while True:
                match = _SPACE.match(self._text, self._at + size)
                size += len(match[0]) if match else 0
                if self._at + size < len(self._text) or self._closed or size > _MAX_SPACE:
                    break
                yield
            size = min(size, _MAX_SPACE + 1)
        for literal in sorted(literals, key=len, reverse=True):
            # Only as far as it matches: waiting for all ten characters would hold back nine of text.
            length = 0
            while length < len(literal):
                head = yield from self.lookahead(size + length + 1)
                if head[size:] != literal[: length + 1]:
                    break
                length += 1
            if length == len(literal):
                self.advance(size + len(literal))
                return literal
        return ""

    def scan(self, marks: Marks, write: Callable[[str], None], follows: Sequence[Follow] = ()) -> Wait[str]:
        """Read up to and including one of `marks`, passing on the text before it as it arrives; "" at the end.

        follows: what may come after a mark, after white space. A mark that none of them follows is text.
        """
        while True:
            where, mark = marks.find(self._text, self._at, self._closed)
            end = where + len(mark)
            is_end = self._is_followed(end, follows) if mark else None
            if is_end is False:
                where = end
            if where > self._at:
                write(self.advance(where - self._at))
            if is_end:
                self.advance(len(mark))
                return mark
            if is_end is None:
                if self._closed:
                    return ""
                yield

    def _is_followed(self, at: int, follows: Sequence[Follow]) -> bool | None:
        """Whether one of `follows` comes at `at`; None: more text decides. A cut answer decides for it."""
        found = [self._matches(at, follow) for follow in follows] or [True]
        return True if True in found or (None in found and self._closed) else None if None in found else False

    def _matches(self, at: int, follow: Follow) -> bool | None:
        text = self._text
        for part in follow:
            space = _SPACE.match(text, at)
            at = space.end() if space is not None else at
            if isinstance(part, str):
                if not text.startswith(part, at):
                    return None if part.startswith(text[at:]) else False
                at += len(part)
                continue
            match = part.match(text, at)
            if match is None:
                return None if at == len(text) else False
            if match.end() == len(text):
                return None
            at = match.end()
        return True

    def text_until(self, marks: Marks, kind: EventKind) -> Wait[str]:
        """The same, as text events. White space directly before a mark belongs to the mark; at the end, to the text."""
        while True:
            where, mark = marks.find(self._text, self._at, self._closed)
            solid = self._at + len(self._text[self._at : where].rstrip())
            if solid > self._at:
                self._space_is_text = False
            if self._space_is_text or where - solid > _MAX_SPACE:
                solid, self._space_is_text = where, True
            if solid > self._at:
                self.emit(kind, self.advance(solid - self._at))
            if mark:
                self._space_is_text = False
                self.advance(where - solid + len(mark))
                return mark
            if self._closed:
                return ""
            yield

    def read_rest(self) -> Wait[str]:
        """Read all remaining text."""
        while (yield from self.more()):
            pass
        return self.advance(len(self._text) - self._at)

    # Called by parsers to emit events.

    def emit(self, kind: EventKind, text: str = "", *, number: int = -1, call_id: str = "") -> None:
        """Emit an event whose raw text is everything read since the last event."""
        if self._cuts_calls and kind == "content":
            kind, text = "skipped", ""
        raw, self._emitted = self._text[self._emitted : self._at], self._at
        if self._call_text is not None:
            self._call_text.append(raw)
        self._events.append(Event(kind, text, raw, number, call_id))

    def skip(self) -> None:
        """Drop the text read since the last event."""
        if self._at > self._emitted:
            self.emit("skipped")

    def begin_header(self) -> None:
        """Mark the possible start of a call: the header up to its name is limited in length."""
        self._budget = MAX_HEADER

    def end_header(self) -> None:
        """End the header without a call."""
        self._budget = None

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Set the call's name. DamagedCallError if no tools were offered, or the name is invalid."""
        if not self.tools_allowed or _NAME.fullmatch(name) is None or len(name) > MAX_NAME:
            raise DamagedCallError
        self._budget = None
        self._call_text = []
        self.emit("call", name, number=self._num_calls, call_id=call_id or self._new_id())

    def argument(self, json_text: str) -> None:
        """Emit the next piece of the call's arguments."""
        self._arguments.append(json_text)

    def end_call(self) -> None:
        self._emit_arguments()
        self.emit("call_end", number=self._num_calls)
        self._num_calls += 1
        self._call_text = None

    def end_damaged_call(self) -> None:
        """Turn the call being read into text, from its mark up to here."""
        self._budget = None
        self._emit_arguments()
        if self._call_text is None:
            self.emit("content", self._text[self._emitted : self._at])
            return
        before = "".join(self._call_text)
        number, self._call_text = self._num_calls, None
        self._num_calls += 1
        if self._cuts_calls:
            self.emit("call_cut", number=number)
            return
        self.emit("call_damaged", before + self._text[self._emitted : self._at], number=number)

    def _emit_arguments(self) -> None:
        pieces = "".join(self._arguments)
        self._arguments.clear()
        if pieces:
            self.emit("arguments", pieces, number=self._num_calls)


def read_section(
    reader: TextReader, mark: str, call: str, read_call: Callable[[], Wait[None]], end: str
) -> Wait[None]:
    """Read the rest of a section of calls, each after the mark `call`, and its end if it has one. mark: the one that
    has been read, of the section or of its first call. read_call: reads the rest of a call."""
    if mark != call:
        yield from reader.skip_space()
        yield from reader.expect(call)
    while True:
        yield from read_call()
        reader.begin_header()
        if not (yield from reader.accept(call)):
            break
    yield from reader.accept(end)
