"""Hermes and Qwen: <tool_call>{"name": "f", "arguments": {…}}</tool_call>, one pair of marks per call."""

from __future__ import annotations

from twofold.text.chat.json_stream import read_call_object
from twofold.text.chat.reader import TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.skip_space()
    yield from read_call_object(reader)
    # A complete object is a call, even if the answer ends before its end mark.
    yield from reader.accept("</tool_call>")
