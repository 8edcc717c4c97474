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
_BEHIND_TEXT: Final = Marks((*_ENDS, _START, _CHANNEL))
_WORDS: Final = re.compile(r"[^<]*")
_MAX_WORDS: Final = 512
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")
_FUNCTIONS: Final = "functions."


def read_answer(reader: TextReader, schemas: ToolSchemas) -> Wait[None]:
    mark = yield from reader.found(_START, _CHANNEL, _MESSAGE)
    if not mark and (yield from reader.ahead(4)).lstrip().startswith("to="):
        mark = _START
    told: set[EventKind] = set()
    while True:
        kind: EventKind = "content"
        if mark and mark not in _ENDS:
            reader.begin_header()
            try:
                channel, recipient = yield from _read_header(reader, mark)
                if recipient is not None:
                    yield from _read_call(reader, recipient)
                    told.discard("content")
                    mark = yield from reader.found(*_ENDS, _START, _CHANNEL)
                    reader.skip()
                    if mark or not (yield from reader.peek()):
                        if not mark:
                            return
                        continue
                else:
                    reader.end_header()
                    kind = "reasoning" if channel == "analysis" else "content"
                    _begin_text(reader, kind, told)
            except DamagedCallError:
                reader.damaged()
                told.add("content")
        elif mark:
            mark = yield from reader.found(_START, _CHANNEL)
            reader.skip()
            if mark:
                continue
        mark = yield from reader.text_until(_BEHIND_TEXT, kind)
        if not mark:
            rest = yield from reader.rest()
            if rest:
                reader.tell(kind, rest)
            return
        reader.skip()


def _begin_text(reader: TextReader, kind: EventKind, told: set[EventKind]) -> None:
    """Start a text message; a further message of the same kind begins on a new line."""
    if kind in told:
        reader.tell(kind, "\n")
    else:
        reader.skip()
    told.add(kind)


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
        mark = yield from reader.found(_CHANNEL, _CONSTRAIN, _MESSAGE)
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
