"""Hy3 (Hunyuan V3): GLM's calls with <tool_sep> after the name, all of them inside <tool_calls>.

The tags of released checkpoints end in ":opensource", those of the preview do not.
"""

from __future__ import annotations

from functools import partial

from twofold.text.chat.dialects.glm import Tags, read_call
from twofold.text.chat.reader import TextReader, Wait, read_section
from twofold.text.chat.schema_values import ToolSchemas


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    tags = Tags(":opensource" if mark.endswith(":opensource>") else "", "tool_sep")
    one = partial(read_call, reader, schemas, tags)
    yield from read_section(reader, mark, tags.begin("tool_call"), one, tags.end("tool_calls"))
