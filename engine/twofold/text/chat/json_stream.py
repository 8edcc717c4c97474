"""Streaming JSON inside an answer: checked and passed on as it arrives; raw line breaks in strings are escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from twofold.text.chat.reader import DamagedCallError, TextReader, Wait

MAX_DEPTH: Final = 64
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_WORD: Final = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_MAX_WORD: Final = 400

Give = Callable[[str], None]


def read_json(reader: TextReader, give: Give) -> Wait[None]:
    """Read one value. DamagedCallError at the first character that is not valid JSON."""
    closing: list[str] = []
    while True:
        # A value, or the end of the array or object just opened.
        give((yield from reader.take_while(_SPACE)))
        first = yield from reader.peek()
        if first in ("{", "["):
            if len(closing) == MAX_DEPTH:
                raise DamagedCallError
            give(reader.advance())
            closing.append("}" if first == "{" else "]")
            give((yield from reader.take_while(_SPACE)))
            if (yield from reader.peek()) != closing[-1]:
                if first == "{":
                    yield from _read_key(reader, give)
                continue
        elif first == '"':
            yield from read_string(reader, give)
        else:
            yield from _read_word(reader, give)
        # After a value.
        while closing:
            give((yield from reader.take_while(_SPACE)))
            following = yield from reader.peek()
            if following == closing[-1]:
                give(reader.advance())
                closing.pop()
                continue
            if following != ",":
                raise DamagedCallError
            give(reader.advance())
            if closing[-1] == "}":
                give((yield from reader.take_while(_SPACE)))
                yield from _read_key(reader, give)
            break
        if not closing:
            return


def read_string(reader: TextReader, give: Give) -> Wait[None]:
    """Read one string with its quotes."""
    yield from reader.expect('"')
    give('"')
    while True:
        yield from reader.take_while(_PLAIN, give=give)
        character = yield from reader.peek()
        if character == '"':
            give(reader.advance())
            return
        if character == "\\":
            yield from _read_escape(reader, give)
        elif character:
            give(json.dumps(reader.advance())[1:-1])
        else:
            raise DamagedCallError


def read_text(reader: TextReader, read: Callable[[TextReader, Give], Wait[None]] = read_json) -> Wait[str]:
    """A value's JSON, once it is complete."""
    parts: list[str] = []
    yield from read(reader, parts.append)
    return "".join(parts)


def read_members(
    reader: TextReader, give: Give, end: str, read_member: Callable[[], Wait[None]]
) -> Wait[None]:
    """Read members separated by commas, a trailing comma allowed, up to and including `end`, which is not passed on."""
    comma = ""
    while not (yield from reader.found(end)):
        give(comma)
        comma = ", "
        yield from read_member()
        if not (yield from reader.found(",")):
            yield from reader.space()
            yield from reader.expect(end)
            return


def read_arguments(reader: TextReader, give: Give) -> Wait[None]:
    """Read a call's arguments: an object, an object as text in a string, or null for none."""
    yield from reader.space()
    first = yield from reader.peek()
    if first == "{":
        yield from read_json(reader, give)
        return
    text = yield from read_text(reader)
    if first == '"':
        given = json.loads(text).strip()
        try:
            given.encode()
            if not isinstance(json.loads(given, parse_constant=_refuse), dict):
                raise DamagedCallError
        except (ValueError, RecursionError):
            raise DamagedCallError from None
        give(given)
    elif text == "null":
        give("{}")
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
        yield from reader.space()
        key = json.loads((yield from read_text(reader, read_string)))
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
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
        yield from reader.space()
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
    while True:
        reader.begin_header()
        yield from reader.space()
        yield from read_call_object(reader)
        if not (yield from reader.found(",")):
            break
    yield from reader.space()
    yield from reader.expect("]")


def _read_key(reader: TextReader, give: Give) -> Wait[None]:
    yield from read_string(reader, give)
    give((yield from reader.take_while(_SPACE)))
    yield from reader.expect(":")
    give(":")


def _read_escape(reader: TextReader, give: Give) -> Wait[None]:
    escape = yield from reader.ahead(2)
    length = 6 if escape[1:] == "u" else 2
    escape = yield from reader.ahead(length)
    valid = len(escape) == length and (length == 2 or set(escape[2:]) <= _HEX)
    if not valid or (length == 2 and escape[1] not in '"\\/bfnrt'):
        raise DamagedCallError
    # Character by character, because a header may end inside the text.
    for _ in range(length):
        yield from reader.peek()
        reader.advance()
    give(escape)


def _read_word(reader: TextReader, give: Give) -> Wait[None]:
    word = yield from reader.take_while(_WORD, _MAX_WORD)
    if word not in ("true", "false", "null") and NUMBER.fullmatch(word) is None:
        raise DamagedCallError
    give(word)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
