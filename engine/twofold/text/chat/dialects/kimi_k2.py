"""Kimi-K2: a section of calls, each with an id such as functions.f:0 and its arguments. The call keeps this id, because
the template expects it in the conversation."""

from __future__ import annotations

import re
from typing import Final

from twofold.text.chat.json_stream import read_arguments
from twofold.text.chat.reader import MAX_NAME, DamagedCallError, TextReader, Wait, read_section
from twofold.text.chat.schema_values import ToolSchemas

_CALL: Final = "<|tool_call_begin|>"
_ID: Final = re.compile(r"[^\s<]*")
_PARTS: Final = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    def read_call() -> Wait[None]:
        yield from reader.skip_space()
        call_id = yield from reader.take_while(_ID, MAX_NAME)
        parts = _PARTS.fullmatch(call_id)
        if parts is None:
            raise DamagedCallError
        yield from reader.skip_space()
        yield from reader.expect("<|tool_call_argument_begin|>")
        reader.begin_call(parts["name"], call_id if ":" in call_id else None)
        yield from read_arguments(reader, reader.argument)
        reader.end_call()
        yield from reader.accept("<|tool_call_end|>")

    yield from read_section(reader, mark, _CALL, read_call, "<|tool_calls_section_end|>")
