"""Hy3 (Hunyuan V3): GLM's calls with <tool_sep> after the name, all of them inside <tool_calls>.

The tags of released checkpoints end in ":opensource", those of the preview do not.
"""

from __future__ import annotations

from twofold.text.chat.dialects.glm import Tags, read_call
from twofold.text.chat.reader import TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    tags = Tags(":opensource" if mark.endswith(":opensource>") else "", "tool_sep")
    call = tags.begin("tool_call")
    if mark != call:
        yield from reader.skip_space()
        yield from reader.expect(call)
    while True:
        yield from read_call(reader, schemas, tags)
        reader.begin_header()
        if not (yield from reader.accept(call)):
            break
    yield from reader.accept(tags.end("tool_calls"))
