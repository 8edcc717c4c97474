"""Granite 3: <|tool_call|>[{"name": "f", "arguments": {…}}, …], or one object without the list.

Hunyuan writes the same list after <tool_calls>, and </tool_calls> after it.
"""

from __future__ import annotations

from twofold.text.chat.json_stream import read_call_list, read_call_object
from twofold.text.chat.reader import TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.skip_space()
    read = read_call_list if (yield from reader.peek()) == "[" else read_call_object
    yield from read(reader)
    if mark == "<tool_calls>":
        yield from reader.accept("</tool_calls>")
