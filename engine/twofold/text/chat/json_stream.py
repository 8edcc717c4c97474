"""Streaming JSON inside an answer: checked and passed on as it arrives; raw line breaks in strings are escaped.

Strings and words in Python's notation are passed on as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from twofold.text.chat.reader import DamagedCallError, TextReader, Wait
from twofold.text.chat.schema_values import inside_string

MAX_DEPTH: Final = 64
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_MAX_WORD: Final = 400
_PYTHON_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"',
    "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "",
}  # fmt: skip
_HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}
WORDS: Final = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
"""Literals of JSON and Python → JSON."""

Write = Callable[[str], None]


def read_json(reader: TextReader, write: Write) -> Wait[None]:
    """Read one value. DamagedCallError at the first character that is not valid JSON."""
    closing: list[str] = []
    while True:
        # A value, or the end of the array or object just opened.
        write((yield from reader.take_while(_SPACE)))
        first = yield from reader.peek()
        if first in ("{", "["):
            if len(closing) == MAX_DEPTH:
                raise DamagedCallError
            write(reader.advance())
            closing.append("}" if first == "{" else "]")
            write((yield from reader.take_while(_SPACE)))
            if (yield from reader.peek()) != closing[-1]:
                if first == "{":
                    yield from _read_key(reader, write)
                continue
        elif first in ('"', "'"):
            yield from read_string(reader, write)
        else:
            yield from _read_word(reader, write)
        # After a value.
        while closing:
            write((yield from reader.take_while(_SPACE)))
            following = yield from reader.peek()
            if following == closing[-1]:
                write(reader.advance())
                closing.pop()
                continue
            if following != ",":
                raise DamagedCallError
            write(reader.advance())
            if closing[-1] == "}":
                write((yield from reader.take_while(_SPACE)))
                yield from _read_key(reader, write)
            break
        if not closing:
            return


def read_string(reader: TextReader, write: Write) -> Wait[None]:
    """Read one string with its quotes; models trained on printed objects write them as Python does."""
    if (yield from reader.peek()) == "'":
        yield from read_python_string(reader, write)
        return
    yield from reader.expect('"')
    write('"')
    while True:
        yield from reader.take_while(_PLAIN, write=write)
        character = yield from reader.peek()
        if character == '"':
            write(reader.advance())
            return
        if character == "\\":
            yield from _read_escape(reader, write)
        elif character:
            write(json.dumps(reader.advance())[1:-1])
        else:
            raise DamagedCallError


def read_python_string(reader: TextReader, write: Write) -> Wait[None]:
    """Read a string in Python's notation, with its quotes, and pass it on as JSON."""
    quote = reader.advance()
    write('"')
    while True:
        yield from reader.take_while(_PYTHON_PLAIN[quote], write=lambda text: write(inside_string(text)))
        character = yield from reader.peek()
        if character == quote:
            reader.advance()
            write('"')
            return
        if character == "\\":
            yield from _read_python_escape(reader, write)
        elif character:
            # An unescaped line break in a string.
            write(inside_string(reader.advance()))
        else:
            raise DamagedCallError


def _read_python_escape(reader: TextReader, write: Write) -> Wait[None]:
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


def read_text(reader: TextReader, read: Callable[[TextReader, Write], Wait[None]] = read_json) -> Wait[str]:
    """A value's JSON, once it is complete."""
    parts: list[str] = []
    yield from read(reader, parts.append)
    return "".join(parts)


def read_members(
    reader: TextReader, write: Write, end: str, read_member: Callable[[], Wait[None]]
) -> Wait[None]:
    """Read members separated by commas, a trailing comma allowed, up to and including `end`, which is not passed on."""
    comma = ""
    while not (yield from reader.accept(end)):
        write(comma)
        comma = ", "
        yield from read_member()
        if not (yield from reader.accept(",")):
            yield from reader.skip_space()
            yield from reader.expect(end)
            return


def read_arguments(reader: TextReader, write: Write) -> Wait[None]:
    """Read a call's arguments: an object, an object as text in a string, or null for none."""
    yield from reader.skip_space()
    first = yield from reader.peek()
    if first == "{":
        yield from read_json(reader, write)
        return
    text = yield from read_text(reader)
    if first in ('"', "'"):
        given = json.loads(text).strip()
        try:
            given.encode()
            if not isinstance(json.loads(given, parse_constant=_refuse), dict):
                raise DamagedCallError
        except (ValueError, RecursionError):
            raise DamagedCallError from None
        write(given)
    elif text == "null":
        write("{}")
    else:
        raise DamagedCallError


def read_call_object(reader: TextReader, *, bare: bool = False) -> Wait[None]:
    """Read {"name": …, "arguments": {…}}, in any order and with any further members, as a whole call.

    `bare`: there was no mark, the brace has been read, and both members are required.
    """
    name: str | None = None
    early: list[str] = []
    has_arguments = False
    if not bare:
        yield from reader.expect("{")
    while True:
        yield from reader.skip_space()
        key = json.loads((yield from read_text(reader, read_string)))
        yield from reader.skip_space()
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == "name" and name is None:
            name = str(json.loads((yield from read_text(reader, read_string))))
            if not bare or has_arguments:
                reader.begin_call(name)
            for piece in early:
                reader.argument(piece)
        elif key in ("arguments", "parameters") and not has_arguments:
            has_arguments = True
            if bare and name is not None:
                reader.begin_call(name)
            yield from read_arguments(reader, early.append if name is None else reader.argument)
        else:
            yield from read_json(reader, lambda ignored: None)
        yield from reader.skip_space()
        following = yield from reader.peek()
        if following not in (",", "}"):
            raise DamagedCallError
        reader.advance()
        if following == "}":
            break
    if name is None or (bare and not has_arguments):
        raise DamagedCallError
    if not has_arguments:
        reader.argument("{}")
    reader.end_call()


def read_call_list(reader: TextReader) -> Wait[None]:
    """Read [call, call, …] of such objects."""
    yield from reader.expect("[")
    yield from read_listed_calls(reader)


def read_listed_calls(reader: TextReader) -> Wait[None]:
    """Read what follows the bracket of such a list."""
    while True:
        reader.begin_header()
        yield from reader.skip_space()
        yield from read_call_object(reader)
        if not (yield from reader.accept(",")):
            break
    yield from reader.skip_space()
    yield from reader.expect("]")


def _read_key(reader: TextReader, write: Write) -> Wait[None]:
    yield from read_string(reader, write)
    write((yield from reader.take_while(_SPACE)))
    yield from reader.expect(":")
    write(":")


def _read_escape(reader: TextReader, write: Write) -> Wait[None]:
    escape = yield from reader.lookahead(2)
    length = 6 if escape[1:] == "u" else 2
    escape = yield from reader.lookahead(length)
    valid = len(escape) == length and (length == 2 or set(escape[2:]) <= _HEX)
    if not valid or (length == 2 and escape[1] not in '"\\/bfnrt'):
        raise DamagedCallError
    # Character by character, because a header may end inside the text.
    for _ in range(length):
        yield from reader.peek()
        reader.advance()
    write(escape)


def _read_word(reader: TextReader, write: Write) -> Wait[None]:
    word = yield from reader.take_while(_WORD, _MAX_WORD)
    if word not in WORDS and NUMBER.fullmatch(word) is None:
        raise DamagedCallError
    write(WORDS.get(word, word))


def _refuse(constant: str) -> None:
    raise ValueError(constant)
