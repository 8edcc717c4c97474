"""Solar-Open: <|tool_calls|>, then for each call <|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>{…} and its
end. The id is the model's own; the answer gets another, because models repeat theirs."""

from __future__ import annotations

import re
from typing import Final

from twofold.text.chat.json_stream import read_arguments
from twofold.text.chat.reader import MAX_NAME, TextReader, Wait, read_section
from twofold.text.chat.schema_values import ToolSchemas

_CALL: Final = "<|tool_call:begin|>"
_ID: Final = re.compile(r"[^\s<]*")


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    def read_call() -> Wait[None]:
        yield from reader.take_while(_ID, MAX_NAME)
        yield from reader.expect("<|tool_call:name|>")
        name = yield from reader.read_name()
        yield from reader.expect("<|tool_call:args|>")
        reader.begin_call(name)
        yield from read_arguments(reader, reader.argument)
        reader.end_call()
        yield from reader.accept("<|tool_call:end|>")

    yield from read_section(reader, mark, _CALL, read_call, "<|calls|>")
