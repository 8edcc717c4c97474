"""What becomes of a chat's answer besides text: which parsers read it, and what of it the client wants to see."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from twofold.api.config import ServerConfig
from twofold.api.constraints import Constraint
from twofold.chat.answer_grammar import Calls, answer_constraint
from twofold.chat.answer_parser import AnswerParser
from twofold.chat.marks import ChatMarks, chosen_marks
from twofold.models.registry import chat_marks
from twofold.server.api_errors import ApiError
from twofold.server.prompts import Prompt
from twofold.server.protocol import ServingEngine, ServingTokenizer
from twofold.server.schemas import ChatRequest


def marks_of(config: ServerConfig, engine: ServingEngine) -> ChatMarks:
    """Those of the model that is served, or what --tool-call-parser and --reasoning-parser say instead."""
    shown = chat_marks(engine.info.architecture, engine.tokenizer.chat_template)
    return chosen_marks(shown, config.tool_call_parser, config.reasoning_parser)


@dataclasses.dataclass(frozen=True)
class ChatReading:
    """How the answers to one request are read."""

    marks: ChatMarks
    """Only of what is read."""
    tools: tuple[Mapping[str, Any], ...]
    shown_tokens: frozenset[int]
    end_tokens: tuple[int, ...]
    hides_reasoning: bool
    one_call: bool

    @classmethod
    def of(cls, body: ChatRequest, marks: ChatMarks, tokenizer: ServingTokenizer) -> ChatReading:
        """ApiError 400 where tools are offered to a model of which no calls can be read."""
        if body.offered_tools and marks.tool_call_parser is None:
            raise ApiError(
                400,
                "tools: this model's chat template shows no calls of tools in a form that is known, so none could be "
                "read; leave them out, or start the server with --tool-call-parser NAME",
                param="tools",
            )
        if body.offered_tools and "tools" not in tokenizer.template_variables:
            raise ApiError(
                400,
                "tools: this model's chat template does not read them, so the model would not be told of them; leave "
                "them out, or describe them in a message",
                param="tools",
            )
        read = dataclasses.replace(
            marks,
            tool_call_parser=marks.tool_call_parser if body.offered_tools else None,
            reasoning_parser=None if body.separate_reasoning is False else marks.reasoning_parser,
        )
        special = tokenizer.special_token_ids
        shown = {tokenizer.token_id(token) for token in read.tokens}
        ends = [tokenizer.token_id(token) for token in marks.end_of_turn]
        return cls(
            read,
            tuple(body.offered_tools),
            frozenset(token_id for token_id in shown if token_id in special and token_id is not None),
            tuple(token_id for token_id in ends if token_id in special and token_id is not None),
            hides_reasoning=body.include_reasoning is False,
            one_call=body.parallel_tool_calls is False,
        )

    def constraint(
        self, body: ChatRequest, marks: ChatMarks, tokenizer: ServingTokenizer, prompt: Prompt
    ) -> Constraint | None:
        """What the answer to `prompt` must match. RequestError where the model's dialect cannot be held to it.

        marks: all of the model's, read or not.
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
            special_id=special_id,
            end_tokens=self.end_tokens,
        )

    def parser(self, prompt: Prompt) -> AnswerParser | None:
        """For one answer to `prompt`; None where all of it is text."""
        if self.marks.tool_call_parser is None and self.marks.reasoning_parser is None:
            return None
        return AnswerParser(
            self.marks.tool_call_parser,
            self.marks.reasoning_parser,
            self.tools,
            reasoning_opened=prompt.opens_reasoning,
        )
