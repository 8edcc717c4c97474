"""Gemma 4: <|tool_call>call:f{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: JSON with bare keys, whose strings stand
between marks and have no escapes."""

from __future__ import annotations

import json
import re
from typing import Final

from twofold.text.chat.json_stream import MAX_DEPTH, NUMBER, Give, read_members
from twofold.text.chat.reader import DamagedCallError, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas, inside_string

_QUOTE: Final = '<|"|>'
_QUOTED_END: Final = Marks((_QUOTE,))
_KEY: Final = re.compile(r"[^:{}\[\],<]*")
_WORD: Final = re.compile(r"[^,{}\[\]<]*")
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "None": "null"}
_MAX_WORD: Final = 4096


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.space()
    yield from reader.expect("call:")
    name = yield from reader.name()
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise DamagedCallError
    reader.begin_call(name)
    yield from _read_object(reader, reader.argument, 0)
    reader.end_call()
    yield from reader.found("<tool_call|>")


def _read_object(reader: TextReader, give: Give, depth: int) -> Wait[None]:
    reader.advance()
    give("{")
    yield from read_members(reader, give, "}", lambda: _read_pair(reader, give, depth + 1))
    give("}")


def _read_pair(reader: TextReader, give: Give, depth: int) -> Wait[None]:
    if (yield from reader.found(_QUOTE)):
        yield from _read_quoted(reader, give)
    else:
        yield from reader.space()
        key = (yield from reader.take_while(_KEY, _MAX_WORD)).strip()
        if not key:
            raise DamagedCallError
        give(json.dumps(key, ensure_ascii=False))
    yield from reader.space()
    yield from reader.expect(":")
    give(": ")
    yield from _read_value(reader, give, depth)


def _read_value(reader: TextReader, give: Give, depth: int) -> Wait[None]:
    if depth > MAX_DEPTH:
        raise DamagedCallError
    if (yield from reader.found(_QUOTE)):
        yield from _read_quoted(reader, give)
        return
    yield from reader.space()
    first = yield from reader.peek()
    if first == "{":
        yield from _read_object(reader, give, depth)
    elif first == "[":
        reader.advance()
        give("[")
        yield from read_members(reader, give, "]", lambda: _read_value(reader, give, depth + 1))
        give("]")
    else:
        word = (yield from reader.take_while(_WORD, _MAX_WORD)).strip()
        if not word:
            raise DamagedCallError
        known = _WORDS.get(word, word if NUMBER.fullmatch(word) else None)
        give(json.dumps(word, ensure_ascii=False) if known is None else known)


def _read_quoted(reader: TextReader, give: Give) -> Wait[None]:
    """Read the rest of a string, after its first mark."""
    give('"')
    if not (yield from reader.scan(_QUOTED_END, lambda text: give(inside_string(text)))):
        raise DamagedCallError
    give('"')
