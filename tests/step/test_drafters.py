"""Drafters propose what their texts say: the index against brute force, the drafters against examples by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.speculative_config import METHODS, SpeculativeConfig, parse_speculative_config
from twofold.api.types import GenerationRequest
from twofold.step.drafters import _DRAFTERS, WITH_MODEL, ngram, open_drafter, token_index
from twofold.step.drafters.token_index import TokenIndex, TokenMatch
from twofold.step.drafts import DraftState
from twofold.step.sequences import Sequence


def expected_match(text: list[int], newest: list[int], least: int, most: int) -> TokenMatch | None:
    """Compares every position."""

    def length(end: int) -> int:
        same = 0
        while same < min(end, len(newest), most) and text[end - 1 - same] == newest[-1 - same]:
            same += 1
        return same

    found = [(length(end), end) for end in range(len(text), 0, -1) if length(end) >= least]
    found = found[: token_index._CANDIDATES]
    best = max(found, default=None)
    return None if best is None else TokenMatch(best[1], best[0])


@given(st.data())
def test_the_index_finds_the_longest_match(data: st.DataObject) -> None:
    letters = st.integers(0, data.draw(st.integers(0, 3)))
    text, newest = data.draw(st.lists(letters, max_size=60)), data.draw(st.lists(letters, max_size=12))
    least = data.draw(st.integers(1, 3))
    most = data.draw(st.integers(least, 8))
    index = TokenIndex(least, most)
    for end in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4))):
        index.extend(text, end)
        assert index.num_indexed == end
    index.extend(text, len(text))
    assert index.longest(text, newest) == expected_match(text, newest, least, most)


def sequence(
    method: str, prompt: tuple[int, ...], answer: tuple[int, ...] = (), prediction: tuple[int, ...] = ()
) -> Sequence:
    made = Sequence(0, GenerationRequest(prompt, prediction=prediction), list(prompt + answer), max_tokens=99)
    made.drafting = DraftState(method)
    return made


CONFIG = SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=4)


@pytest.mark.parametrize(
    ("tokens", "depth", "drafted"),
    [
        ((1, 2, 3, 4, 5, 9, 2, 3), 2, (4, 5)),
        ((1, 2, 3, 4, 8, 2, 3, 5, 9, 1, 2, 3), 2, (4, 8)),  # the longer match, though an older one
        ((1, 2, 3, 4, 8, 2, 3, 5, 9, 2, 3), 2, (5, 9)),  # of two, the newer one
        ((7, 1, 2, 1, 2), 5, (1, 2, 1, 2, 1)),  # a repetition goes on
        ((6, 6, 6), 3, (6, 6, 6)),
        ((1, 2, 3, 4), 3, ()),
        ((1, 2), 3, ()),
        ((1,), 3, ()),
    ],
)  # fmt: skip
def test_prompt_lookup_proposes_what_followed(
    tokens: tuple[int, ...], depth: int, drafted: tuple[int, ...]
) -> None:
    draft = open_drafter("ngram", CONFIG).propose(sequence("ngram", tokens[:1], tokens[1:]), depth)
    assert draft.tokens == drafted
    assert len(draft.chances) == len(drafted)
    assert all(0 < a <= b < 1 for a, b in zip(draft.chances, draft.chances[1:], strict=False))


def test_a_long_prompt_is_indexed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_TOKENS_AT_ONCE", 4)
    drafter, own = open_drafter("ngram", CONFIG), sequence("ngram", (1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3))
    assert [drafter.propose(own, 2).tokens for _ in range(4)] == [(), (), (4, 5), (4, 5)]


@pytest.mark.parametrize(
    ("changed", "drafted"),
    [
        ((50,), (19, 20, 21)),  # taken to replace one token
        ((50, 51), (20, 21, 22)),  # or as many as it has
        ((50, 51, 19), (20, 21, 22)),  # until one of the source occurs
        ((50, 51, 19, 20), (21, 22, 23)),
        ((25,), (26, 27, 28)),  # tokens left out
        ((16,), (17, 18, 19)),  # tokens repeated
        (tuple(range(50, 80)), ()),  # another text
    ],
)
def test_a_draft_continues_after_a_difference(changed: tuple[int, ...], drafted: tuple[int, ...]) -> None:
    source = tuple(range(10, 40))
    drafter, own = open_drafter("ngram", CONFIG), sequence("ngram", (*source, 1), source[:8])
    assert drafter.propose(own, 3).tokens == (18, 19, 20)
    for token in changed:
        own.token_ids.append(token)
        found = drafter.propose(own, 3)
    assert found.tokens == drafted


def test_a_short_match_is_no_text_to_follow() -> None:
    drafter = open_drafter("ngram", dataclasses.replace(CONFIG, prompt_lookup_max=8))
    own = sequence("ngram", (1, 2, 3, 4, 5, 9, 2, 3))
    assert drafter.propose(own, 2).tokens == (4, 5)
    own.token_ids.append(8)
    assert drafter.propose(own, 2).tokens == ()


def test_a_prediction_is_followed_and_found_again() -> None:
    drafter, own = (
        open_drafter("prediction", CONFIG),
        sequence("prediction", (1, 2), (), (20, 21, 22, 23, 24, 25, 26)),
    )

    def after(*answer: int) -> tuple[int, ...]:
        own.token_ids[2:] = answer
        return drafter.propose(own, 3).tokens

    assert after(20) == (21, 22, 23)
    assert after(20, 21, 22) == (23, 24, 25)
    assert after(20, 21, 22, 50) == ()
    assert after(20, 21, 22, 50, 24) == ()
    assert after(20, 21, 22, 50, 24, 25) == (26,)
    assert after(20, 21, 22, 50, 24, 25, 26) == ()
    assert after(20, 21, 22, 50, 24, 25, 26, 20, 21) == (22, 23, 24)


def test_every_method_has_a_drafter() -> None:
    assert set(METHODS) == {*_DRAFTERS, *WITH_MODEL}
    for method in _DRAFTERS:
        open_drafter(method, CONFIG)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "was given 'ngram'; it takes a JSON object"),
        ("[1]", "it takes a JSON object"),
        ("{", "it takes a JSON object"),
        ('{"num_speculative_tokens": 3}', "method is missing; it takes ngram, suffix"),
        ('{"method": "medusa"}', "method was given 'medusa'; it takes ngram, suffix"),
        ('{"method": ["ngram"]}', r"method was given \['ngram'\]"),
        ('{"method": "ngram", "depth": 3}', "'depth' is no key; it takes method, model, num_spec"),
        ('{"method": "ngram", "num_speculative_tokens": 17}', "was given 17; it takes a whole number from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens was given 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens was given True"),
        ('{"method": "ngram", "adaptive": 1}', "adaptive was given 1; it takes true or false"),
        ('{"method": "ngram", "prompt_lookup_min": 40}', "prompt_lookup_min 40 is above prompt_lookup_max 32"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        EngineConfig(speculative_config=text)
    assert "--speculative-config" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_vllms_spelling_of_ngram_is_read() -> None:
    for text in ('{"model": "ngram"}', '{"model": "[ngram]"}', '{"method": "ngram"}'):
        assert parse_speculative_config(text) == SpeculativeConfig("ngram")
