"""Calls in Python syntax: [f(a=1, b="x"), g()]. Llama 4 writes them bare or between marks, LFM2 between marks."""

from __future__ import annotations

import json
import re
from typing import Final

from twofold.text.chat.json_stream import MAX_DEPTH, NUMBER, Write, read_members
from twofold.text.chat.reader import MAX_NAME, DamagedCallError, TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas, inside_string

_NAME: Final = re.compile(r"[\w.-]*")
_WORD: Final = re.compile(r"[-+.\w]*")
_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_MAX_WORD: Final = 400
_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"',
    "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "",
}  # fmt: skip
_HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}
_HEX: Final = frozenset("0123456789abcdefABCDEF")


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    if mark != "[":
        yield from reader.skip_space()
        yield from reader.expect("[")
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
    yield from reader.accept("<|python_end|>", "<|tool_call_end|>")


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
        yield from _read_string(reader, write)
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
        if word not in _WORDS and NUMBER.fullmatch(word) is None:
            raise DamagedCallError
        write(_WORDS.get(word, word))


def _read_pair(reader: TextReader, write: Write, depth: int) -> Wait[None]:
    yield from reader.skip_space()
    if (yield from reader.peek()) not in ("'", '"'):
        raise DamagedCallError
    yield from _read_string(reader, write)
    yield from reader.skip_space()
    yield from reader.expect(":")
    write(": ")
    yield from _read_value(reader, write, depth)


def _read_string(reader: TextReader, write: Write) -> Wait[None]:
    quote = reader.advance()
    write('"')
    while True:
        yield from reader.take_while(_PLAIN[quote], write=lambda text: write(inside_string(text)))
        character = yield from reader.peek()
        if character == quote:
            reader.advance()
            write('"')
            return
        if character == "\\":
            yield from _read_escape(reader, write)
        elif character:
            # An unescaped line break in a string.
            write(inside_string(reader.advance()))
        else:
            raise DamagedCallError


def _read_escape(reader: TextReader, write: Write) -> Wait[None]:
    escape = yield from reader.lookahead(2)
    if len(escape) < 2:
        raise DamagedCallError
    length = _HEX_ESCAPES.get(escape[1])
    if length is None:
        reader.advance(2)
        # As in Python, an unknown escape is kept.
        write(inside_string(_ESCAPES.get(escape[1], escape)))
        return
    digits = (yield from reader.lookahead(2 + length))[2:]
    code = int(digits, 16) if len(digits) == length and set(digits) <= _HEX else -1
    if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise DamagedCallError
    reader.advance(2 + length)
    write(inside_string(chr(code)))


def _name(reader: TextReader) -> Wait[str]:
    name = yield from reader.take_while(_NAME, MAX_NAME)
    if not name:
        raise DamagedCallError
    return name
