"""DeepSeek: V3 and R1 write "function", a mark, the name and the arguments in a code block; V3.1 the name, the mark and
the arguments."""

from __future__ import annotations

from typing import Final

from twofold.text.chat.json_stream import read_arguments
from twofold.text.chat.reader import TextReader, Wait, read_section
from twofold.text.chat.schema_values import ToolSchemas

_CALL: Final = "<｜tool▁call▁begin｜>"
_SEP: Final = "<｜tool▁sep｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_FENCE: Final = "```"


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    def read_call() -> Wait[None]:
        yield from reader.skip_space()
        name = yield from reader.read_name()
        yield from reader.expect(_SEP)
        yield from reader.skip_space()
        is_fenced = (yield from reader.peek()) != "{"
        if is_fenced:
            name = yield from reader.read_name()
            yield from reader.skip_space()
            yield from reader.expect(f"{_FENCE}json")
        reader.begin_call(name)
        yield from read_arguments(reader, reader.argument)
        reader.end_call()
        if is_fenced:
            yield from reader.accept(_FENCE)
        yield from reader.accept(_CALL_END)

    yield from read_section(reader, mark, _CALL, read_call, _CALLS_END)
