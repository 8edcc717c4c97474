"""Mistral: [TOOL_CALLS][{"name": "f", "arguments": {…}, "id": …}, …], and since 2025 [TOOL_CALLS]f[CALL_ID]…[ARGS]{…},
where [CALL_ID] is optional."""

from __future__ import annotations

import re
from typing import Final

from twofold.text.chat.json_stream import read_arguments, read_call_list
from twofold.text.chat.reader import DamagedCallError, TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas

_ID: Final = re.compile(r"[A-Za-z0-9_-]*")
_MAX_ID: Final = 64


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.skip_space()
    if (yield from reader.peek()) == "[":
        yield from read_call_list(reader)
        return
    name = yield from reader.read_name()
    call_id = ""
    if (yield from reader.accept("[CALL_ID]")):
        call_id = yield from reader.take_while(_ID, _MAX_ID)
    yield from reader.accept("[ARGS]")
    yield from reader.skip_space()
    if (yield from reader.peek()) != "{":
        raise DamagedCallError
    reader.begin_call(name, call_id or None)
    yield from read_arguments(reader, reader.argument)
    reader.end_call()
