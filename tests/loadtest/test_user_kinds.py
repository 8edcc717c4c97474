"""What each kind of user asks, turn by turn, without a server."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from twofold.api.errors import ConfigError
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.user_kinds import TOOLS, USER_KINDS, Asker, Turn, parse_mix

PASSAGES = tuple(f"passage {number} of a tale about a fox" for number in range(20))


def asker(seed: int = 0, **changes: Any) -> Asker:
    given: dict[str, Any] = {
        "model": "m",
        "passages": PASSAGES,
        "max_context": 4096,
        "max_output_tokens": 128,
    }
    return Asker(random.Random(seed), **(given | changes))


def talk(kind: str, answer: AnswerStream, **changes: Any) -> list[Turn]:
    """The turns of one conversation in which every answer is `answer`."""
    conversation = USER_KINDS[kind](asker(**changes))
    turns = [next(conversation)]
    while True:
        try:
            turns.append(conversation.send(answer))
        except StopIteration:
            return turns


def words_of(turn: Turn) -> int:
    return sum(len((message["content"] or "").split()) for message in turn.body["messages"])


ANSWERS = AnswerStream(0.0, pieces=["He went home."], finish_reason="stop")


@pytest.mark.parametrize("kind", USER_KINDS)
@pytest.mark.parametrize("max_context", [256, 4096])
def test_a_seed_gives_the_same_requests_and_all_fit_the_context(kind: str, max_context: int) -> None:
    for seed in range(20):
        turns = talk(kind, ANSWERS, seed=seed, max_context=max_context)
        assert turns == talk(kind, ANSWERS, seed=seed, max_context=max_context)
        for turn in turns:
            assert turn.body["stream"]
            assert turn.body["stream_options"] == {"include_usage": True}
            assert 0 < turn.body["max_tokens"] <= 128
            # 1.35 tokens per word; room is left for the chat template.
            assert 1.35 * words_of(turn) + turn.body["max_tokens"] < 0.95 * max_context
    assert turns != talk(kind, ANSWERS, seed=99, max_context=max_context)


def test_chats_have_one_to_four_turns_that_repeat_the_history() -> None:
    lengths = set()
    for seed in range(40):
        turns = talk("chat", ANSWERS, seed=seed)
        lengths.add(len(turns))
        for before, after in itertools.pairwise(turns):
            history = [*before.body["messages"], {"role": "assistant", "content": "He went home."}]
            assert after.body["messages"][:-1] == history
            assert after.body["messages"][-1]["role"] == "user"
    assert lengths == {1, 2, 3, 4}


def test_a_failure_ends_a_conversation() -> None:
    for kind in ("chat", "agent"):
        conversation = USER_KINDS[kind](asker())
        next(conversation)
        with pytest.raises(StopIteration):
            conversation.send(None)


def test_long_prompts_are_long_bursts_are_simultaneous_and_impatient_users_disconnect() -> None:
    (long,) = talk("long-prompt", ANSWERS)
    (burst,) = talk("burst", ANSWERS)
    patience_s = [talk("impatient", ANSWERS, seed=seed)[0].patience_s or 0.0 for seed in range(200)]
    assert words_of(long) > 800
    assert burst.at_once == 8
    assert 0.02 <= min(patience_s) < 0.1
    assert 1 < max(patience_s) <= 2
    assert long.patience_s is None


def test_an_agents_history_grows_by_calls_and_their_results() -> None:
    calls = {
        index: {"id": f"c{index}", "type": "function", "function": {"name": "find_tale", "arguments": "{}"}}
        for index in range(2)
    }
    called = AnswerStream(0.0, finish_reason="tool_calls", tool_calls=calls)
    first, second, *_ = talk("agent", called, calls_tools=True)
    assert first.body["tools"] == list(TOOLS)
    assert first.body["tool_choice"] == "required"
    added = second.body["messages"][2:]
    assert [message["role"] for message in added] == ["assistant", "tool", "tool"]
    assert added[0]["tool_calls"] == list(calls.values())
    assert [message["tool_call_id"] for message in added[1:]] == ["c0", "c1"]
    cut = AnswerStream(0.0, pieces=["{"], finish_reason="length", tool_calls=calls)
    _, after_cut, *_ = talk("agent", cut, calls_tools=True)
    assert [message["role"] for message in after_cut.body["messages"][2:]] == ["assistant", "user"]
    without, then, *_ = talk("agent", ANSWERS)
    assert "tools" not in without.body
    assert "find_tale" in without.body["messages"][0]["content"]
    assert then.body["messages"][-1]["content"].startswith("Result of the tool: ")


def test_a_mix_names_kinds_and_weights() -> None:
    assert parse_mix("chat:8, agent,burst:2") == {"chat": 8, "agent": 1, "burst": 2}
    for wrong in ("", "chat:0", "chat:x", "walker", "chat,chat:2", "chat:1000"):
        with pytest.raises(ConfigError, match="KIND:WEIGHT is expected"):
            parse_mix(wrong)
