"""The suffix automaton against a brute-force count, and proposals worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.step.drafters.suffix import EarlierAnswers, SuffixDrafter
from twofold.step.drafters.suffix_automaton import ROOT, SuffixAutomaton
from twofold.step.drafts import Draft, DraftState
from twofold.step.sequences import Sequence

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=3)


def followers(texts: list[list[int]], context: list[int]) -> Counter[int]:
    """Tokens after each occurrence of the context."""
    size = len(context)
    return Counter(
        text[at + size] for text in texts for at in range(len(text) - size) if text[at : at + size] == context
    )


@given(texts=TEXTS, max_context=st.integers(2, 6), query=st.lists(st.integers(0, 3), max_size=12))
def test_counts_are_those_of_all_occurrences(
    texts: list[list[int]], max_context: int, query: list[int]
) -> None:
    automaton = SuffixAutomaton(max_context)
    for text in texts:
        automaton.begin_text()
        for token in text:
            automaton.add(token)
    state, length = ROOT, 0
    for at, token in enumerate(query, 1):
        state, length = automaton.follow(state, length, token)
        ends = [query[at - size : at] for size in range(min(at, max_context), 0, -1)]
        known = [
            len(end)
            for end in ends
            if any(text[i : i + len(end)] == end for text in texts for i in range(len(text)))
        ]
        assert length == (known[0] if known else 0)
        found = automaton.likeliest(state, length)
        context = query[at - min(length, max_context - 1) : at]
        expected = followers(texts, context) if context else Counter[int]()
        if not expected:
            assert found is None
            continue
        assert found is not None
        assert expected[found.token] == max(expected.values())
        assert found.share == pytest.approx(expected[found.token] / expected.total())


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_repeated_end_is_the_longest_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton(64)
    for token in text:
        automaton.add(token)
    longest = max(
        size
        for size in range(len(text))
        if size == 0 or any(text[at : at + size] == text[-size:] for at in range(len(text) - size))
    )
    assert automaton.repeated_end()[1] == longest


def sequence(prompt: list[int], answer: list[int], salt: str = "") -> Sequence:
    request = GenerationRequest(tuple(prompt), SamplingParams(), lambda chunk: None, "one", cache_salt=salt)
    return Sequence(0, request, [*prompt, *answer], 100, drafting=DraftState("suffix"))


def test_it_continues_with_what_followed_most_often() -> None:
    drafter = SuffixDrafter(SpeculativeConfig("suffix"))
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 5, 8, 7]
    # After 1 2 3: 5 twice, 4 once. After 2 3 5 (a context of 4): 9 once, 8 once.
    found = drafter.propose(sequence(text, [1, 2, 3]), 2)
    assert found.tokens[0] == 5
    assert found.chances[0] == pytest.approx(2 / 3 * 4 / 6)
    assert drafter.propose(sequence([1, 2, 3], [4]), 4) == Draft((), ())


def test_a_draft_is_as_long_as_its_match_and_ends_where_it_is_unlikely() -> None:
    text = [*range(10, 30), 1, *range(10, 13)]

    def draft(**keys: float) -> tuple[int, ...]:
        drafter = SuffixDrafter(SpeculativeConfig("suffix", **keys))  # type: ignore[arg-type]
        return drafter.propose(sequence(text, []), 8).tokens

    assert draft() == (13, 14, 15)
    assert draft(suffix_decoding_max_spec_factor=2.0) == (13, 14, 15, 16, 17, 18)
    text = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]
    assert len(draft(suffix_decoding_min_token_prob=0.6)) == 0
    assert len(draft()) > 0


def test_earlier_answers_are_proposed_only_if_allowed_and_without_a_salt() -> None:
    answer = list(range(40, 60))
    for most, salt, then_salt, expected in (
        (4, "", "", (43, 44, 45)), (0, "", "", ()), (4, "a", "", ()), (4, "", "a", ()),
    ):  # fmt: skip
        drafter = SuffixDrafter(SpeculativeConfig("suffix", suffix_decoding_max_cached_requests=most))
        drafter.release(sequence([1], answer, salt))
        assert drafter.propose(sequence([2, 3], [40, 41, 42], then_salt), 8).tokens == expected


def test_old_answers_are_forgotten() -> None:
    answers = EarlierAnswers(4, 8)
    for first in range(0, 100, 10):
        answers.add([first, first + 1, first + 2])
        assert len(answers.automata) <= 2
    assert [automaton.num_tokens for automaton in answers.automata] == [6, 6]
    assert not any(automaton.follow(ROOT, 0, 0)[1] for automaton in answers.automata)
    assert any(automaton.follow(ROOT, 0, 90)[1] for automaton in answers.automata)
