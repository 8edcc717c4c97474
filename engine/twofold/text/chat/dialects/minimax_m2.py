"""MiniMax-M2: <minimax:tool_call><invoke name="f"><parameter name="key">value</parameter></invoke>…

DeepSeek-V3.2 writes the same tags with "｜DSML｜" in front of their names, and says of each value whether it is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twofold.text.chat.reader import KEY, DamagedCallError, Follow, Marks, TextReader, Wait, read_section
from twofold.text.chat.schema_values import ArgumentsWriter, ToolSchemas


@dataclass(frozen=True)
class Tags:
    """The tags of a dialect."""

    prefix: str
    """The begin of each tag's name."""
    calls_end: str

    def begin(self, tag: str) -> str:
        return f"<{self.prefix}{tag} name="

    def end(self, tag: str) -> str:
        return f"</{self.prefix}{tag}>"


_MINIMAX: Final = Tags("", "</minimax:tool_call>")
_DSML: Final = Tags("｜DSML｜", "</｜DSML｜function_calls>")


def read_calls(reader: TextReader, mark: str, schemas: ToolSchemas) -> Wait[None]:
    tags = _DSML if "DSML" in mark else _MINIMAX
    call, parameter = tags.begin("invoke"), tags.begin("parameter")
    value_end = Marks((tags.end("parameter"),))
    follows: tuple[Follow, ...] = ((parameter, KEY, ">"), (tags.end("invoke"),))

    def read_call() -> Wait[None]:
        name = yield from _quoted_name(reader)
        yield from reader.expect(">")
        reader.begin_call(name)
        arguments = ArgumentsWriter(reader, schemas, name)
        while (yield from reader.accept(parameter)):
            key = yield from _quoted_name(reader)
            is_text = yield from reader.accept(' string="true"', ' string="false"', after_space=False)
            yield from reader.expect(">")
            text = is_text.endswith('"true"')
            if not (yield from arguments.value(key, value_end, follows, is_text=text)):
                raise DamagedCallError
        yield from reader.skip_space()
        yield from reader.expect(tags.end("invoke"))
        arguments.end()

    yield from read_section(reader, mark, call, read_call, tags.calls_end)


def _quoted_name(reader: TextReader) -> Wait[str]:
    """A name; its quotes are optional."""
    quote = yield from reader.accept('"', "'", after_space=False)
    name = yield from reader.read_name()
    yield from reader.expect(quote)
    return name
