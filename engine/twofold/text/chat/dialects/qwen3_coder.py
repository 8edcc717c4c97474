"""Qwen3-Coder and Qwen3.5: <tool_call><function=f><parameter=key>, each value between line breaks of its own.

Seed-OSS has other marks around a call. The line breaks may be missing.
"""

from __future__ import annotations

from typing import Final

from twofold.text.chat.reader import KEY, DamagedCallError, Follow, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ArgumentsWriter, ToolSchemas

_FUNCTION: Final = "<function="
_PARAMETER_END: Final = Marks(("</parameter>",))
_AFTER_VALUE: Final[tuple[Follow, ...]] = (("<parameter=", KEY, ">"), ("</function>",))


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    # Models sometimes omit the first mark.
    if mark != _FUNCTION:
        yield from reader.skip_space()
        yield from reader.expect(_FUNCTION)
    name = yield from reader.read_name()
    yield from reader.expect(">")
    reader.begin_call(name)
    arguments = ArgumentsWriter(reader, schemas, name)
    while (yield from reader.accept("<parameter=")):
        key = yield from reader.read_name()
        yield from reader.expect(">")
        if not (yield from arguments.value(key, _PARAMETER_END, _AFTER_VALUE, own_lines=True)):
            raise DamagedCallError
    yield from reader.skip_space()
    yield from reader.expect("</function>")
    arguments.end()
    yield from reader.accept("</tool_call>", "</seed:tool_call>")
