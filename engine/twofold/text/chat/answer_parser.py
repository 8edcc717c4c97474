"""Parses one answer: pieces of text in, events out."""

from __future__ import annotations

import importlib
import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from twofold.text.chat.dialects import REASONING_PARSERS, TOOL_PARSERS, ToolDialect, encloses_answer
from twofold.text.chat.events import Event, EventKind
from twofold.text.chat.reader import DamagedCallError, Marks, TextReader, Wait
from twofold.text.chat.schema_values import ToolSchemas

_LETTERS: Final = string.ascii_letters + string.digits


ReadCalls = Callable[[TextReader, str, ToolSchemas], Wait[None]]
"""`read_calls` of a dialect's module: reads what follows a mark; DamagedCallError if it is not a call."""


class AnswerParser:
    """Events of one answer. No text raises an error: what is not a call is text."""

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        reasoning_opened: bool = False,
        only_calls: bool = False,
    ) -> None:
        """
        Args:
            tool_parser: a name of TOOL_PARSERS; None: tool calls are text.
            reasoning_parser: a name of REASONING_PARSERS; None: reasoning is text.
            tools: offered tools, in OpenAI's form; their schemas give the types of values between tags.
            reasoning_opened: the prompt ends inside the model's reasoning.
            only_calls: after its reasoning the answer consists of calls: other text is dropped, a damaged call is cut.
        """
        self._tool = None if tool_parser is None else TOOL_PARSERS[tool_parser]
        self._reasoning = None if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]
        self._opened = reasoning_opened
        self._schemas = ToolSchemas(tools)
        id_length = 9 if self._tool is not None and self._tool.short_ids else None
        self._reader = TextReader(lambda: _new_id(id_length), tools_allowed=self._tool is not None)
        self._only_calls = only_calls
        self._reader.cut_calls(only_calls)
        self._run = self._parse_whole() if encloses_answer(tool_parser, reasoning_parser) else self._parse()
        self._ended = False

    def push(self, text: str) -> list[Event]:
        """Parse the next piece of the answer. A possible beginning of a mark is held back."""
        self._reader.push(text)
        return self._step()

    def finish(self, *, cuts_calls: bool = False) -> list[Event]:
        """Parse the end of the answer. cuts_calls: as in `TextReader.cut_calls`."""
        self._reader.cut_calls(self._only_calls or cuts_calls)
        self._reader.close()
        return self._step()

    def _step(self) -> list[Event]:
        if not self._ended:
            try:
                next(self._run)
            except StopIteration:
                self._ended = True
        return self._reader.take_events()

    def _parse_whole(self) -> Wait[None]:
        harmony = importlib.import_module("twofold.text.chat.dialects.harmony")
        yield from harmony.read_answer(self._reader, self._schemas)

    def _parse(self) -> Wait[None]:
        reader, tool, reasoning = self._reader, self._tool, self._reasoning
        after_call = False
        if reasoning is not None and (self._opened or (yield from reader.accept(*reasoning.begins))):
            mark = yield from self._read_reasoning()
            if tool is not None and mark in tool.begins:
                yield from self._read_calls(tool, mark)
                after_call = True
        if tool is not None and tool.at_start:
            mark = yield from reader.accept(*tool.at_start)
            if mark:
                yield from self._read_calls(tool, mark)
                after_call = True
        begins = reasoning.begins if reasoning is not None and reasoning.anywhere else ()
        dropped = reasoning.dropped if reasoning is not None else ()
        calls = tool.begins if tool is not None else ()
        marks = Marks((*begins, *dropped, *calls))
        while True:
            num_calls = reader.num_calls
            mark = yield from reader.text_until(marks, "content")
            if not mark:
                # White space after the last call is not part of the answer.
                rest = yield from reader.read_rest()
                if rest:
                    reader.emit(*(("skipped", "") if after_call else ("content", rest)))
                return
            if mark in begins:
                mark = yield from self._read_reasoning()
            elif mark in dropped:
                reader.skip()
                continue
            if tool is not None and mark in calls:
                yield from self._read_calls(tool, mark)
                after_call = reader.num_calls > num_calls

    def _read_reasoning(self) -> Wait[str]:
        """Read the reasoning, its end mark and the white space after that. Returns the mark."""
        assert self._reasoning is not None
        reader, reasoning = self._reader, self._reasoning
        yield from self._skip_space()
        # Marks that are special tokens cannot be part of the reasoning text.
        calls = self._tool.begins if self._tool is not None and self._tool.marks_are_tokens else ()
        kind: EventKind = "reasoning"
        mark = yield from reader.text_until(Marks((*reasoning.ends, *calls)), kind)
        if not mark:
            rest = yield from reader.read_rest()
            if rest:
                reader.emit(kind, rest)
        elif mark not in calls:
            yield from self._skip_space()
        return mark

    def _skip_space(self) -> Wait[None]:
        yield from self._reader.skip_space()
        self._reader.skip()

    def _read_calls(self, tool: ToolDialect, mark: str) -> Wait[None]:
        module = importlib.import_module(f"twofold.text.chat.dialects.{tool.module}")
        read_calls: ReadCalls = module.read_calls
        reader = self._reader
        reader.begin_header()
        try:
            yield from read_calls(reader, mark, self._schemas)
            reader.end_header()
            reader.skip()
        except DamagedCallError:
            reader.end_damaged_call()


def _new_id(length: int | None) -> str:
    if length is not None:
        return "".join(random.choices(_LETTERS, k=length))  # noqa: S311  a name, no secret
    return "call_" + "".join(random.choices(_LETTERS, k=24))  # noqa: S311
