"""Labels of prompts: equal exactly where the texts before them are."""

import json

import pytest
from twofold.server.fleet.prefix_labels import prompt_of


def labels(**fields: object) -> tuple[bytes, ...]:
    return prompt_of(json.dumps(fields).encode()).labels


FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A story."}]
ANSWER = [{"role": "assistant", "content": "Once upon a time."}, {"role": "user", "content": "Go on."}]


def test_the_next_turn_begins_with_the_labels_of_the_turn_before() -> None:
    first, second = labels(messages=FIRST), labels(messages=FIRST + ANSWER)
    assert len(first) == 2
    assert second[:2] == first
    assert len(set(second)) == 4


@pytest.mark.parametrize("name", ["model", "tools", "system", "cache_salt"])
def test_fields_before_the_messages_change_every_label(name: str) -> None:
    plain, other = labels(messages=FIRST), labels(messages=FIRST, **{name: "other"})
    assert not set(plain) & set(other)


def test_settings_of_the_answer_change_no_label() -> None:
    assert labels(messages=FIRST, temperature=1, stream=True) == labels(messages=FIRST, max_tokens=3)


def test_the_order_of_keys_changes_no_label() -> None:
    turned = [dict(reversed(message.items())) for message in FIRST]
    assert labels(messages=turned) == labels(messages=FIRST)


def test_a_text_has_a_label_per_1024_characters() -> None:
    short, long = labels(prompt="x" * 1500), labels(prompt="x" * 4000)
    assert (len(short), len(long)) == (2, 4)
    assert short[0] == long[0]
    assert short[1] != long[1]


def test_a_long_conversation_keeps_its_first_and_newest_labels() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(100)]
    all_labels = [labels(messages=messages[:end])[-1] for end in range(1, 101)]
    assert labels(messages=messages) == (*all_labels[:8], *all_labels[-56:])


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"{}", b'{"messages": 3}', b"\xff"])
def test_a_body_without_a_prompt_has_no_labels(body: bytes) -> None:
    assert prompt_of(body) == ((), "")


def test_the_model_is_the_one_that_the_body_names() -> None:
    assert prompt_of(b'{"model": "a/b", "prompt": "x"}').model == "a/b"
    assert prompt_of(b'{"model": 3}').model == ""
    assert prompt_of(b"[" * 100_000) == ((), "")
