"""GLM-4.5 to 4.7: <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>, with line breaks between
them up to 4.6."""

from __future__ import annotations

from typing import Final

from twofold.text.chat.reader import DamagedCallError, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ArgumentsWriter, ToolSchemas

_KEY, _END = "<arg_key>", "</tool_call>"
_KEY_END: Final = Marks(("</arg_key>",))
_VALUE_END: Final = Marks(("</arg_value>",))


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from reader.skip_space()
    name = yield from reader.read_name()
    following = yield from reader.accept(_KEY, _END)
    if not following:
        raise DamagedCallError
    reader.begin_call(name)
    arguments = ArgumentsWriter(reader, schemas, name)
    while following == _KEY:
        key: list[str] = []
        if not (yield from reader.scan(_KEY_END, key.append)):
            raise DamagedCallError
        yield from reader.skip_space()
        yield from reader.expect("<arg_value>")
        if not (yield from arguments.value("".join(key).strip(), _VALUE_END)):
            raise DamagedCallError
        following = yield from reader.accept(_KEY, _END)
    if following != _END:
        raise DamagedCallError
    arguments.end()
