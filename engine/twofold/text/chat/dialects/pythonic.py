"""Calls in Python syntax: [f(a=1, b="x"), g()]. Llama 4 writes them bare or between marks, LFM2 between marks."""

from __future__ import annotations

import json
import re
from typing import Final

from twofold.text.chat.json_stream import MAX_DEPTH, NUMBER, Give, read_members
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
        yield from reader.space()
        yield from reader.expect("[")
    while True:
        reader.begin_header()
        yield from reader.space()
        name = yield from _name(reader)
        yield from reader.expect("(")
        reader.begin_call(name)
        reader.argument("{")
        yield from _read_arguments(reader)
        reader.argument("}")
        reader.end_call()
        if not (yield from reader.found(",")):
            break
    yield from reader.space()
    yield from reader.expect("]")
    yield from reader.found("<|python_end|>", "<|tool_call_end|>")


def _read_arguments(reader: TextReader) -> Wait[None]:
    """Read key=value, …) including the parenthesis."""
    comma = ""
    while not (yield from reader.found(")")):
        yield from reader.space()
        key = yield from _name(reader)
        yield from reader.space()
        yield from reader.expect("=")
        reader.argument(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _read_value(reader, reader.argument, 0)
        comma = ", "
        if not (yield from reader.found(",")):
            yield from reader.space()
            yield from reader.expect(")")
            return


def _read_value(reader: TextReader, give: Give, depth: int) -> Wait[None]:
    if depth > MAX_DEPTH:
        raise DamagedCallError
    yield from reader.space()
    first = yield from reader.peek()
    if first in ("'", '"'):
        yield from _read_string(reader, give)
    elif first == "{":
        reader.advance()
        give("{")
        yield from read_members(reader, give, "}", lambda: _read_pair(reader, give, depth + 1))
        give("}")
    elif first in ("[", "("):
        end = "]" if reader.advance() == "[" else ")"
        give("[")
        yield from read_members(reader, give, end, lambda: _read_value(reader, give, depth + 1))
        give("]")
    else:
        word = yield from reader.take_while(_WORD, _MAX_WORD)
        if word not in _WORDS and NUMBER.fullmatch(word) is None:
            raise DamagedCallError
        give(_WORDS.get(word, word))


def _read_pair(reader: TextReader, give: Give, depth: int) -> Wait[None]:
    yield from reader.space()
    if (yield from reader.peek()) not in ("'", '"'):
        raise DamagedCallError
    yield from _read_string(reader, give)
    yield from reader.space()
    yield from reader.expect(":")
    give(": ")
    yield from _read_value(reader, give, depth)


def _read_string(reader: TextReader, give: Give) -> Wait[None]:
    quote = reader.advance()
    give('"')
    while True:
        yield from reader.take_while(_PLAIN[quote], give=lambda text: give(inside_string(text)))
        character = yield from reader.peek()
        if character == quote:
            reader.advance()
            give('"')
            return
        if character == "\\":
            yield from _read_escape(reader, give)
        elif character:
            # An unescaped line break in a string.
            give(inside_string(reader.advance()))
        else:
            raise DamagedCallError


def _read_escape(reader: TextReader, give: Give) -> Wait[None]:
    escape = yield from reader.ahead(2)
    if len(escape) < 2:
        raise DamagedCallError
    length = _HEX_ESCAPES.get(escape[1])
    if length is None:
        reader.advance(2)
        # As in Python, an unknown escape is kept.
        give(inside_string(_ESCAPES.get(escape[1], escape)))
        return
    digits = (yield from reader.ahead(2 + length))[2:]
    code = int(digits, 16) if len(digits) == length and set(digits) <= _HEX else -1
    if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise DamagedCallError
    reader.advance(2 + length)
    give(inside_string(chr(code)))


def _name(reader: TextReader) -> Wait[str]:
    name = yield from reader.take_while(_NAME, MAX_NAME)
    if not name:
        raise DamagedCallError
    return name
