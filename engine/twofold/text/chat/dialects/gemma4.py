"""Gemma 4: <|tool_call>call:f{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: JSON with bare keys, whose strings stand
between marks and have no escapes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from twofold.text.chat.json_stream import MAX_DEPTH, NUMBER, Write, read_members
from twofold.text.chat.reader import DamagedCallError, Follow, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas, inside_string

_QUOTE: Final = '<|"|>'
_QUOTED_END: Final = Marks((_QUOTE,))
_KEY: Final = re.compile(r"[^:{}\[\],<]*")
_WORD: Final = re.compile(r"[^,{}\[\]<]*")
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "None": "null"}
_MAX_WORD: Final = 4096
_AFTER_KEY: Final[tuple[Follow, ...]] = ((":",),)
_AFTER_VALUE: Final[tuple[Follow, ...]] = (("}",), ("]",), (",",))


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.skip_space()
    yield from reader.expect("call:")
    name = yield from reader.read_name()
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        raise DamagedCallError
    reader.begin_call(name)
    yield from _read_object(reader, reader.argument, 0)
    reader.end_call()
    yield from reader.accept("<tool_call|>")


def _read_object(reader: TextReader, write: Write, depth: int) -> Wait[None]:
    reader.advance()
    write("{")
    yield from read_members(reader, write, "}", lambda: _read_pair(reader, write, depth + 1))
    write("}")


def _read_pair(reader: TextReader, write: Write, depth: int) -> Wait[None]:
    if (yield from reader.accept(_QUOTE)):
        yield from _read_quoted(reader, write, _AFTER_KEY)
    else:
        yield from reader.skip_space()
        key = (yield from reader.take_while(_KEY, _MAX_WORD)).strip()
        if not key:
            raise DamagedCallError
        write(json.dumps(key, ensure_ascii=False))
    yield from reader.skip_space()
    yield from reader.expect(":")
    write(": ")
    yield from _read_value(reader, write, depth)


def _read_value(reader: TextReader, write: Write, depth: int) -> Wait[None]:
    if depth > MAX_DEPTH:
        raise DamagedCallError
    if (yield from reader.accept(_QUOTE)):
        yield from _read_quoted(reader, write)
        return
    yield from reader.skip_space()
    first = yield from reader.peek()
    if first == "{":
        yield from _read_object(reader, write, depth)
    elif first == "[":
        reader.advance()
        write("[")
        yield from read_members(reader, write, "]", lambda: _read_value(reader, write, depth + 1))
        write("]")
    else:
        word = (yield from reader.take_while(_WORD, _MAX_WORD)).strip()
        if not word:
            raise DamagedCallError
        known = _WORDS.get(word, word if NUMBER.fullmatch(word) else None)
        write(json.dumps(word, ensure_ascii=False) if known is None else known)


def _read_quoted(reader: TextReader, write: Write, follows: Sequence[Follow] = _AFTER_VALUE) -> Wait[None]:
    """Read the rest of a string, after its first mark."""
    write('"')
    if not (yield from reader.scan(_QUOTED_END, lambda text: write(inside_string(text)), follows)):
        raise DamagedCallError
    write('"')
