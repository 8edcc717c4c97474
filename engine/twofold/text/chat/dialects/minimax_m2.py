"""MiniMax-M2: <minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke>…"""

from __future__ import annotations

from typing import Final

from twofold.text.chat.reader import DamagedCallError, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ArgumentsWriter, ToolSchemas

_PARAMETER_END: Final = Marks(("</parameter>",))


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.skip_space()
    yield from reader.expect("<invoke name=")
    while True:
        name = yield from _quoted_name(reader)
        reader.begin_call(name)
        arguments = ArgumentsWriter(reader, schemas, name)
        while (yield from reader.accept("<parameter name=")):
            key = yield from _quoted_name(reader)
            if not (yield from arguments.value(key, _PARAMETER_END)):
                raise DamagedCallError
        yield from reader.skip_space()
        yield from reader.expect("</invoke>")
        arguments.end()
        reader.begin_header()
        if not (yield from reader.accept("<invoke name=")):
            break
    yield from reader.accept("</minimax:tool_call>")


def _quoted_name(reader: TextReader) -> Wait[str]:
    """A name and the end of its tag; its quotes are optional."""
    quote = yield from reader.accept('"', "'", after_space=False)
    name = yield from reader.read_name()
    yield from reader.expect(f"{quote}>")
    return name
