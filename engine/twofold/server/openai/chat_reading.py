"""How a chat's answer is parsed: which parsers run, and which parts the client wants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from twofold.api.constraints import Constraint
from twofold.server.bridge.models.protocol import Prompt, ServingTokenizer
from twofold.server.http.errors import wrong_field
from twofold.server.openai.schemas import ChatRequest
from twofold.text.chat.answer_grammar import Calls, answer_constraint
from twofold.text.chat.answer_parser import AnswerParser
from twofold.text.chat.marks import ChatMarks


@dataclasses.dataclass(frozen=True)
class ChatReading:
    """Parsing settings for the answers to one request."""

    marks: ChatMarks
    """Marks of the active parsers only."""
    tools: tuple[Mapping[str, Any], ...]
    shown_tokens: frozenset[int]
    end_tokens: tuple[int, ...]
    hides_reasoning: bool
    one_call: bool
    custom_tools: frozenset[str] = frozenset()
    """Names of functions that are custom tools to the client."""
    only_calls: bool = False
    """A forced call whose thinking is not part of the text."""
    forces_a_call: bool = False
    """Whether the answer consists only of calls, after its thinking."""

    @classmethod
    def of(cls, body: ChatRequest, marks: ChatMarks, tokenizer: ServingTokenizer) -> ChatReading:
        """Build from a request. ApiError 400 if it offers tools and the model's calls cannot be parsed."""
        if body.offered_tools and marks.tool_call_parser is None:
            raise wrong_field(
                "tools",
                "this model's chat template has no known form of tool calls, so none could be parsed; leave them out, "
                "or start the server with --tool-call-parser NAME",
            )
        if body.offered_tools and "tools" not in tokenizer.template_variables:
            raise wrong_field(
                "tools",
                "this model's chat template does not render tools, so the model would not see them; leave them out, or "
                "describe them in a message",
            )
        read = dataclasses.replace(
            marks,
            tool_call_parser=marks.tool_call_parser if body.offered_tools else None,
            reasoning_parser=None if body.separate_reasoning is False else marks.reasoning_parser,
        )
        special = tokenizer.special_token_ids
        shown = {tokenizer.token_id(token) for token in read.tokens}
        # The template's mark may also occur inside an answer, where a parser reads it.
        ends = [
            tokenizer.token_id(token)
            for token in dict.fromkeys((*marks.end_of_turn, tokenizer.turn_end))
            if token is not None and (token in marks.end_of_turn or token not in marks.tokens)
        ]
        return cls(
            read,
            tuple(body.offered_tools),
            frozenset(token_id for token_id in shown if token_id in special and token_id is not None),
            tuple(token_id for token_id in ends if token_id in special and token_id is not None),
            hides_reasoning=body.hides_reasoning,
            one_call=body.parallel_tool_calls is False,
            custom_tools=body.custom_tools,
            forces_a_call=body.forces_a_call,
            only_calls=body.forces_a_call and body.separate_reasoning is not False,
        )

    def constraint(
        self, body: ChatRequest, marks: ChatMarks, tokenizer: ServingTokenizer, prompt: Prompt
    ) -> Constraint | None:
        """The constraint on the answer to `prompt`. RequestError if the model's dialect cannot be constrained.

        marks: all marks of the model, parsed or not.
        """
        special = tokenizer.special_token_ids

        def special_id(token: str) -> int | None:
            found = tokenizer.token_id(token)
            return found if found in special else None

        calls = Calls(
            self.tools, body.forces_a_call, body.forced_tool, several=not (self.one_call or body.forced_tool)
        )
        return answer_constraint(
            body.constraint,
            calls,
            marks,
            opened=prompt.opens_reasoning,
            closed=prompt.closes_reasoning,
            special_id=special_id,
            end_tokens=self.end_tokens,
        )

    def parser(self, prompt: Prompt) -> AnswerParser | None:
        """A parser for one answer to `prompt`; None if all of the answer is text."""
        if self.marks.tool_call_parser is None and self.marks.reasoning_parser is None:
            return None
        return AnswerParser(
            self.marks.tool_call_parser,
            self.marks.reasoning_parser,
            self.tools,
            reasoning_opened=prompt.opens_reasoning,
            only_calls=self.only_calls,
        )
