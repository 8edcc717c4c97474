"""Hermes and Qwen: <tool_call>{"name": "f", "arguments": {…}}</tool_call>, one pair of marks a call."""

from __future__ import annotations

from twofold.chat.json_stream import read_call_object
from twofold.chat.reader import TextReader, Wait
from twofold.chat.schema_values import ToolSchemas


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.space()
    yield from read_call_object(reader)
    # What is whole is a call, also where the answer ends before its mark.
    yield from reader.found("</tool_call>")
