"""Thinking budget of an answer: the request's, and the reserve of a constrained answer."""

from __future__ import annotations

from typing import Final

from twofold.api.constraints import CompiledConstraint
from twofold.server.bridge.models.protocol import Prompt, ServingTokenizer
from twofold.text.chat.bounded_thinking import BoundedThinking, ThinkingMarks
from twofold.text.chat.dialects import REASONING_PARSERS, TOOL_PARSERS
from twofold.text.chat.marks import ChatMarks

MOST_RESERVED: Final = 4096
"""A constrained answer reserves half of its tokens, but at most this many, for the part after the thinking."""
_HARMONY: Final = ("<|channel|>analysis<|message|>", "<|end|>")


def bounded_thinking(
    prompt: Prompt,
    constraint: CompiledConstraint | None,
    max_tokens: int | None,
    *,
    budget: int | None,
    marks: ChatMarks,
    tokenizer: ServingTokenizer,
    calls: bool,
) -> CompiledConstraint | None:
    """`constraint` plus the thinking budget of the answer to `prompt`, if it has one.

    Args:
        max_tokens: most tokens of the answer.
        budget: the request's; -1 is none, as in vLLM.
        marks: all marks of the model, parsed or not.
        calls: whether the model may call tools.
    """
    budget = None if budget == -1 else budget
    if constraint is not None and max_tokens is not None:
        most = max_tokens - min(max_tokens // 2, MOST_RESERVED)
        budget = most if budget is None else min(budget, most)
    if budget is None or (constraint is not None and prompt.closes_reasoning):
        return constraint
    found = _thinking_marks(marks, tokenizer, opened=prompt.opens_reasoning, calls=calls)
    if found is None:
        return constraint
    return BoundedThinking(found, budget, tokenizer.token_bytes, constraint)


def _thinking_marks(
    marks: ChatMarks, tokenizer: ServingTokenizer, *, opened: bool, calls: bool
) -> ThinkingMarks | None:
    """The model's thinking marks; None: it has none."""
    dialect = REASONING_PARSERS.get(marks.reasoning_parser or "")
    if dialect is None:
        return None
    begins, ends = ((_HARMONY[0],), (_HARMONY[1],)) if dialect.is_whole else (dialect.begins, dialect.ends)
    tool = TOOL_PARSERS.get(marks.tool_call_parser or "") if calls else None
    # Calls whose marks are tokens also end the thinking.
    others = tool.begins if tool is not None and tool.marks_are_tokens else ()
    return ThinkingMarks(
        tuple(begin.encode() for begin in begins),
        tuple(end.encode() for end in (*ends, *others)),
        tuple(tokenizer.encode(ends[0])),
        anywhere=dialect.anywhere or dialect.is_whole,
        opened=opened,
    )
