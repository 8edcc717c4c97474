"""Where conversations part, for models that can take one up only where a snapshot was made."""

from __future__ import annotations

from twofold.models.bundled import bundled_model_path
from twofold.server.openai.prompts import chat_prompts
from twofold.server.openai.schemas import ChatRequest
from twofold.text.chat.marks import ChatMarks
from twofold.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.open(bundled_model_path())
SYSTEM = {"role": "system", "content": "You tell fairy tales. " * 9}
REQUESTED = {"role": "user", "content": "Tell me of a fox and a raven."}


def prompt(*messages: dict[str, str], **fields: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    body = ChatRequest.model_validate({"messages": list(messages), **fields})
    (made,) = chat_prompts(body, TOKENIZER, ChatMarks(), with_turn_ends=True)
    return made.token_ids, made.turn_ends


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def test_a_prompt_gets_snapshots_before_its_last_message_and_before_the_answer() -> None:
    token_ids, ends = prompt(SYSTEM, REQUESTED)
    other, _ = prompt(SYSTEM, {"role": "user", "content": "What is a raven?"})
    following, _ = prompt(SYSTEM, REQUESTED, {"role": "user", "content": "And then?"})
    before_last, before_answer = ends
    assert 0 < before_last <= num_common(token_ids, other) < before_answer < len(token_ids)
    assert before_answer <= num_common(token_ids, following)
    assert before_answer > len(token_ids) - 8


def test_a_prompt_that_is_cut_counts_from_its_end() -> None:
    token_ids, ends = prompt(SYSTEM, REQUESTED)
    cut, ends_of_cut = prompt(SYSTEM, REQUESTED, truncate_prompt_tokens=20)
    assert len(cut) == 20
    assert ends_of_cut == tuple(end - len(token_ids) + 20 for end in ends if end > len(token_ids) - 20)


def test_a_prompt_that_is_cut_on_the_right_has_no_turn_ends() -> None:
    token_ids, _ = prompt(SYSTEM, REQUESTED)
    assert prompt(SYSTEM, REQUESTED, truncate_prompt_tokens=20, truncation_side="right") == (
        token_ids[:20],
        (),
    )


def test_one_message_alone_parts_before_the_answer_only() -> None:
    token_ids, ends = prompt(REQUESTED)
    assert len(ends) == 1
    assert 0 < ends[0] < len(token_ids)
