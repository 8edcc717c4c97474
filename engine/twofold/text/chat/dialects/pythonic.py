"""Calls in Python syntax: [f(a=1, b="x"), g()]. Llama 4 writes them bare or between marks, LFM2 between marks.

Between marks the list may also hold JSON objects: LFM2 writes them if the prompt asks for JSON.
"""

from __future__ import annotations

import json
import re
from typing import Final

from twofold.text.chat.json_stream import (
    MAX_DEPTH,
    NUMBER,
    WORDS,
    Write,
    read_listed_calls,
    read_members,
    read_python_string,
)
from twofold.text.chat.reader import MAX_NAME, DamagedCallError, TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas

_NAME: Final = re.compile(r"[\w.-]*")
_WORD: Final = re.compile(r"[-+.\w]*")
_MAX_WORD: Final = 400
_ENDS: Final = ("<|python_end|>", "<|tool_call_end|>")


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    if mark != "[":
        yield from reader.skip_space()
        yield from reader.expect("[")
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from read_listed_calls(reader)
            yield from reader.accept(*_ENDS)
            return
    while True:
        reader.begin_header()
        yield from reader.skip_space()
        name = yield from _name(reader)
        yield from reader.expect("(")
        reader.begin_call(name)
        reader.argument("{")
        yield from _read_arguments(reader)
        reader.argument("}")
        reader.end_call()
        if not (yield from reader.accept(",")):
            break
    yield from reader.skip_space()
    yield from reader.expect("]")
    yield from reader.accept(*_ENDS)


def _read_arguments(reader: TextReader) -> Wait[None]:
    """Read key=value, …) including the parenthesis."""
    comma = ""
    while not (yield from reader.accept(")")):
        yield from reader.skip_space()
        key = yield from _name(reader)
        yield from reader.skip_space()
        yield from reader.expect("=")
        reader.argument(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _read_value(reader, reader.argument, 0)
        comma = ", "
        if not (yield from reader.accept(",")):
            yield from reader.skip_space()
            yield from reader.expect(")")
            return


def _read_value(reader: TextReader, write: Write, depth: int) -> Wait[None]:
    if depth > MAX_DEPTH:
        raise DamagedCallError
    yield from reader.skip_space()
    first = yield from reader.peek()
    if first in ("'", '"'):
        yield from read_python_string(reader, write)
    elif first == "{":
        reader.advance()
        write("{")
        yield from read_members(reader, write, "}", lambda: _read_pair(reader, write, depth + 1))
        write("}")
    elif first in ("[", "("):
        end = "]" if reader.advance() == "[" else ")"
        write("[")
        yield from read_members(reader, write, end, lambda: _read_value(reader, write, depth + 1))
        write("]")
    else:
        word = yield from reader.take_while(_WORD, _MAX_WORD)
        if word not in WORDS and NUMBER.fullmatch(word) is None:
            raise DamagedCallError
        write(WORDS.get(word, word))


def _read_pair(reader: TextReader, write: Write, depth: int) -> Wait[None]:
    yield from reader.skip_space()
    if (yield from reader.peek()) not in ("'", '"'):
        raise DamagedCallError
    yield from read_python_string(reader, write)
    yield from reader.skip_space()
    yield from reader.expect(":")
    write(": ")
    yield from _read_value(reader, write, depth)


def _name(reader: TextReader) -> Wait[str]:
    name = yield from reader.take_while(_NAME, MAX_NAME)
    if not name:
        raise DamagedCallError
    return name
