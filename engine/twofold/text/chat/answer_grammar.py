"""The grammar of a whole answer: reasoning, then tool calls, text, or what a `response_format` describes.

Free text ends at a mark; marks that are special tokens are not text. So no text outside the grammar's calls can be
parsed as a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from twofold.api.constraints import Constraint
from twofold.api.errors import RequestError
from twofold.text.chat.call_arguments import ToolArguments
from twofold.text.chat.call_forms import CallForm, form_of, pieces
from twofold.text.chat.dialects import REASONING_PARSERS, TOOL_PARSERS, encloses_answer, tokens_of
from twofold.text.chat.lark import ANY_TEXT, Lark, escaped, without
from twofold.text.chat.marks import ChatMarks

_ANSWER: Final = "@answer"
"""Placeholder for the requested answer form, inside the frame."""
_HARMONY: Final = "openai"
_SPACE: Final = r"/[ \t\r\n]{1,4}/"
_NUMBER: Final = "/[0-9]{1,4}/"


@dataclass(frozen=True)
class Calls:
    """A request's tools and tool choice."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Offered tools, in OpenAI's form."""
    forced: bool = False
    """The answer must be a call."""
    name: str | None = None
    """Name of the only tool that may be called."""
    several: bool = True

    @property
    def need_grammar(self) -> bool:
        """Whether a grammar must constrain the calls."""
        return self.forced or any(tool["function"].get("strict") for tool in self.tools)


def answer_constraint(
    answer_form: Constraint | None,
    calls: Calls,
    marks: ChatMarks,
    *,
    opened: bool,
    closed: bool = False,
    special_id: Callable[[str], int | None],
    end_tokens: Sequence[int] = (),
) -> Constraint | None:
    """The constraint for the engine; None: no constraint.

    Args:
        answer_form: the constraint of an answer without tool calls.
        opened: the prompt ends inside the model's thinking.
        closed: reasoning is off or finished, so that the grammar has none.
        special_id: the id of a special token, None for plain text.
        end_tokens: tokens that end the model's turn, besides those that its files declare.

    Raises:
        RequestError: a tool's requested constraint cannot be expressed in the model's dialect.
    """
    is_harmony = encloses_answer(marks.tool_call_parser, marks.reasoning_parser)
    has_marks = marks.thinking is not None or is_harmony
    if not calls.need_grammar and (answer_form is None or not (calls.tools or has_marks)):
        return answer_form
    made = _AnswerGrammar(answer_form, calls, marks, opened=opened, closed=closed, special_id=special_id)
    start = made.harmony() if is_harmony else made.start()
    if end_tokens:
        start = f"({start}) ({' | '.join(f'<[{token}]>' for token in end_tokens)})?"
    text, parts = made.lark.grammar(start), made.parts
    if answer_form is not None and not calls.forced:
        own = (answer_form.field, "", answer_form.text)
        parts = (*parts, own) if answer_form.kind == "json_schema" else parts
        return replace(answer_form, frame=text, parts=parts)
    return Constraint("grammar", text, field="tool_choice" if calls.forced else "tools", parts=parts)


class _AnswerGrammar:
    def __init__(
        self,
        answer_form: Constraint | None,
        calls: Calls,
        marks: ChatMarks,
        *,
        opened: bool,
        closed: bool,
        special_id: Callable[[str], int | None],
    ) -> None:
        self._answer_form = answer_form
        self._calls = calls
        self._marks = marks
        self._opened = opened
        self._closed = closed
        self._special_id = special_id
        self._reasoning = REASONING_PARSERS.get(marks.reasoning_parser or "")
        tool = marks.tool_call_parser if calls.tools else None
        self.lark = Lark(tokens_of(tool, marks.reasoning_parser), special_id)

    def start(self) -> str:
        thinking = self._thinking()
        body = self._body()
        if not thinking:
            return body
        between = self._reasoning.between if self._reasoning is not None else ""
        after = self.lark.text(between) if between else f"{self.lark.terminal(_SPACE)}?"
        reasoning = f"{thinking} {after}"
        return f"{reasoning} ({body})" if self._opened else f"({reasoning})? ({body})"

    def harmony(self) -> str:
        """Messages with a channel each; the prompt has begun the first one."""
        lark = self.lark
        next_message = lark.text("<|end|><|start|>assistant")
        free = lark.terminal(ANY_TEXT)
        thinking = f"{lark.text('<|channel|>analysis<|message|>')} {free} {next_message}"
        commentary = f"{lark.text('<|channel|>commentary<|message|>')} {free} {next_message}"
        answer = (
            f"{lark.text('<|channel|>final<|message|>')} {free if self._answer_form is None else _ANSWER}"
        )
        calls = self._harmony_call() if self._calls.tools else ""
        if self._calls.forced:
            return f"({thinking})* ({calls})"
        return f"(({thinking}) | ({commentary}))* ({answer}{f' | {calls}' if calls else ''})"

    def _harmony_call(self) -> str:
        lark = self.lark
        expressions = []
        for tool in self._tools:
            to = f" to=functions.{tool.name}"
            head = f"{lark.text('<|channel|>commentary' + to)} | {lark.text(to + '<|channel|>commentary')}"
            kind = f'({lark.text(" ")} {lark.text("<|constrain|>")}? "json")?'
            arguments = tool.expression(lark, CallForm("$args"))
            expressions.append(lark.rule(f"({head}) {kind} {lark.text('<|message|>')} {arguments}"))
        return lark.any_of(expressions)

    def _thinking(self) -> str:
        dialect = self._reasoning
        if dialect is None or not dialect.begins or self._closed:
            return ""
        lark = self.lark
        tool = TOOL_PARSERS.get(self._marks.tool_call_parser or "") if self._calls.tools else None
        # Calls of such dialects are also parsed inside the reasoning.
        marks = tool.begins if tool is not None and tool.marks_are_tokens else ()
        text = without(_containing(mark) for mark in marks if not lark.is_token(mark))
        ends = lark.any_of(lark.up_to(end, text) for end in dialect.ends)
        return ends if self._opened else f"{lark.any_of(map(lark.text, dialect.begins))} {ends}"

    def _body(self) -> str:
        free, lead = self._free(()), self._lead()
        if not self._calls.tools:
            return lead + (free if self._answer_form is None else _ANSWER)
        name = self._marks.tool_call_parser
        assert name is not None
        dialect, lark = TOOL_PARSERS[name], self.lark
        form = form_of(name, lambda token: self._special_id(token) is not None)
        if self._calls.forced:
            return f"{lark.text(form.begin)} {self._calls_after(form)}"
        if self._answer_form is not None and dialect.at_start:
            raise RequestError(
                f"{self._answer_form.field}: this model does not mark the beginning of a tool call, so a call cannot "
                "be distinguished from such an answer; leave tools out, or send tool_choice 'required' or 'none'",
                param=self._answer_form.field,
            )
        calls = self._calls_after(form)
        if self._answer_form is not None:
            return f"{lark.text(form.begin)} {calls} | {lead}{_ANSWER}"
        marks = [mark for mark in dialect.begins if not lark.is_token(mark)]
        if not form.begin:
            return f"{calls} | ({self._free(marks, dialect.at_start)})?"
        mark = next((mark for mark in marks if form.begin.startswith(mark)), "")
        text = self._free(marks)
        if not mark:  # special token
            return f"{lead}{text} {lark.text(form.begin)} {calls} | {lead}{text}"
        head = lark.rule(f'{self._free([each for each in marks if each != mark])} "{mark}"', "[lazy]")
        return f"{lead}{head} {lark.text(form.begin.removeprefix(mark))} {calls} | {lead}{text}"

    def _lead(self) -> str:
        """The mark before text, which the model may leave out; empty: there is none."""
        mark = self._reasoning.lead if self._reasoning is not None else ""
        return f"{self.lark.text(mark)}? " if mark else ""

    def _free(self, marks: Sequence[str], starts: Sequence[str] = ()) -> str:
        """Text without these marks that does not begin like a call or reasoning."""
        dialect = self._reasoning
        begins = dialect.begins if dialect is not None and not self._opened else ()
        begins = tuple(begin for begin in begins if not self.lark.is_token(begin))
        excluded = [_containing(mark) for mark in marks]
        excluded += [rf"\s*{escaped(begin)}(?s:.*)" for begin in (*begins, *starts)]
        return self.lark.terminal(without(excluded))

    def _calls_after(self, form: CallForm) -> str:
        """Calls after `form.begin`."""
        call = self.lark.any_of(self._call(form, tool) for tool in self._tools)
        more = f" ({self.lark.text(form.between)} {call})*" if self._calls.several else ""
        return f"{call}{more} {self.lark.text(form.end) if form.end else ''}"

    def _call(self, form: CallForm, tool: ToolArguments) -> str:
        places = {"args": tool.expression(self.lark, form), "number": _NUMBER}
        # A name may end in the middle of a text between two marks.
        parts = pieces(form.call.replace("$name", tool.name))
        expressions = [
            places[part] if number % 2 else self.lark.text(part) for number, part in enumerate(parts) if part
        ]
        return self.lark.rule(" ".join(expressions))

    @property
    def parts(self) -> tuple[tuple[str, str, str], ...]:
        """The constrained tools' schemas (`Constraint.parts`)."""
        return tuple(
            ("tools", tool.name, json.dumps(tool.document)) for tool in self._tools if tool.constrained
        )

    @cached_property
    def _tools(self) -> list[ToolArguments]:
        return [
            ToolArguments(tool, constrained=self._calls.forced or bool(tool["function"].get("strict")))
            for tool in self._calls.tools
            if self._calls.name in (None, tool["function"]["name"])
        ]


def _containing(mark: str) -> str:
    return rf"(?s:.*){escaped(mark)}(?s:.*)"
