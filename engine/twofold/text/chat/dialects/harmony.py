"""gpt-oss: an answer is several messages, each with a channel. analysis is reasoning, final and commentary are text,
and commentary to functions.f is a call. The prompt ends with "<|start|>assistant".

Reference: OpenAI's description of the harmony format.
"""

from __future__ import annotations

import re
from typing import Final

from twofold.text.chat.events import EventKind
from twofold.text.chat.json_stream import read_arguments
from twofold.text.chat.reader import DamagedCallError, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN: Final = "<|constrain|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_TEXT_ENDS: Final = Marks((*_ENDS, _START, _CHANNEL))
_WORDS: Final = re.compile(r"[^<]*")
_MAX_WORDS: Final = 512
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")
_FUNCTIONS: Final = "functions."


def read_answer(reader: TextReader, schemas: ToolSchemas) -> Wait[None]:
    mark = yield from reader.accept(_START, _CHANNEL, _MESSAGE)
    if not mark and (yield from reader.lookahead(4)).lstrip().startswith("to="):
        mark = _START
    emitted_kinds: set[EventKind] = set()
    while True:
        kind: EventKind = "content"
        if mark and mark not in _ENDS:
            reader.begin_header()
            try:
                channel, recipient = yield from _read_header(reader, mark)
                if recipient is not None:
                    yield from _read_call(reader, recipient)
                    emitted_kinds.discard("content")
                    mark = yield from reader.accept(*_ENDS, _START, _CHANNEL)
                    reader.skip()
                    if mark or not (yield from reader.peek()):
                        if not mark:
                            return
                        continue
                else:
                    reader.end_header()
                    kind = "reasoning" if channel == "analysis" else "content"
                    _begin_text(reader, kind, emitted_kinds)
            except DamagedCallError:
                reader.end_damaged_call()
                emitted_kinds.add("content")
        elif mark:
            mark = yield from reader.accept(_START, _CHANNEL)
            reader.skip()
            if mark:
                continue
        mark = yield from reader.text_until(_TEXT_ENDS, kind)
        if not mark:
            rest = yield from reader.read_rest()
            if rest:
                reader.emit(kind, rest)
            return
        reader.skip()


def _begin_text(reader: TextReader, kind: EventKind, emitted_kinds: set[EventKind]) -> None:
    """Start a text message; a further message of the same kind begins on a new line."""
    if kind in emitted_kinds:
        reader.emit(kind, "\n")
    else:
        reader.skip()
    emitted_kinds.add(kind)


def _read_header(reader: TextReader, mark: str) -> Wait[tuple[str, str | None]]:
    """(channel, recipient) of a message, read up to its text. DamagedCallError if it has no header."""
    channel, recipient = "", None
    while mark != _MESSAGE:
        words = yield from reader.take_while(_WORDS, _MAX_WORDS)
        if mark == _CHANNEL:
            channel = (words.split() or [""])[0]
        found = _RECIPIENT.search(words)
        if found is not None and found[1] != "assistant":
            recipient = found[1]
        mark = yield from reader.accept(_CHANNEL, _CONSTRAIN, _MESSAGE)
        if not mark:
            raise DamagedCallError
    return channel, recipient


def _read_call(reader: TextReader, recipient: str) -> Wait[None]:
    if not recipient.startswith(_FUNCTIONS):
        # The model's built-in tools (browser, python) are not available.
        raise DamagedCallError
    reader.begin_call(recipient.removeprefix(_FUNCTIONS))
    yield from read_arguments(reader, reader.argument)
    reader.end_call()
