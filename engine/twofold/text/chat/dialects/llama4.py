"""Llama 3 and 4: {"name": "f", "parameters": {…}} as the whole answer; several follow one another."""

from __future__ import annotations

from twofold.text.chat.dialects import pythonic
from twofold.text.chat.json_stream import read_call_object
from twofold.text.chat.reader import TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    if mark != "{":
        yield from reader.skip_space()
        if (yield from reader.peek()) == "[":
            # A model prompted for one form may answer in the other.
            yield from pythonic.read_calls(reader, mark, schemas)
            return
        yield from reader.expect("{")
    yield from read_call_object(reader, bare=True)
    reader.begin_header()
    while (yield from reader.accept("{", ";{", "; {")):
        reader.begin_header()
        yield from read_call_object(reader, bare=True)
        reader.begin_header()
    yield from reader.accept("<|python_end|>")
