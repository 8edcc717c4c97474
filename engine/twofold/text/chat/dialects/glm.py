"""GLM-4.5 to 4.7: <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>, with line breaks between
them up to 4.6."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twofold.text.chat.reader import KEY, DamagedCallError, Follow, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ArgumentsWriter, ToolSchemas


@dataclass(frozen=True)
class Tags:
    """The tags of a dialect."""

    suffix: str = ""
    """The end of each tag's name."""
    after_name: str = ""
    """A tag between the name and the parameters."""

    def begin(self, tag: str) -> str:
        return f"<{tag}{self.suffix}>"

    def end(self, tag: str) -> str:
        return f"</{tag}{self.suffix}>"


_TAGS: Final = Tags()


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    yield from read_call(reader, schemas, _TAGS)


def read_call(reader: TextReader, schemas: ToolSchemas, tags: Tags) -> Wait[None]:
    """Read what follows the begin of one call. DamagedCallError if it is not a call."""
    key_tag, end = tags.begin("arg_key"), tags.end("tool_call")
    key_end, value_end = Marks((tags.end("arg_key"),)), Marks((tags.end("arg_value"),))
    follows: tuple[Follow, ...] = (
        (key_tag, KEY, tags.end("arg_key"), tags.begin("arg_value")),
        (end,),
    )
    yield from reader.skip_space()
    name = yield from reader.read_name()
    if tags.after_name:
        yield from reader.skip_space()
        yield from reader.expect(tags.begin(tags.after_name))
    following = yield from reader.accept(key_tag, end)
    if not following:
        raise DamagedCallError
    reader.begin_call(name)
    arguments = ArgumentsWriter(reader, schemas, name)
    while following == key_tag:
        key: list[str] = []
        if not (yield from reader.scan(key_end, key.append)):
            raise DamagedCallError
        yield from reader.skip_space()
        yield from reader.expect(tags.begin("arg_value"))
        if not (yield from arguments.value("".join(key).strip(), value_end, follows)):
            raise DamagedCallError
        following = yield from reader.accept(key_tag, end)
    if following != end:
        raise DamagedCallError
    arguments.end()
