"""The scheduler and its page pool: who runs when, and that no page is ever lost or shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.kv_cache import PagePool
from twofold.scheduler import Scheduler, Sequence
from twofold.types import GenerationRequest, SamplingParams


def make_sequence(number: int, prompt_tokens: int, max_tokens: int = 8) -> Sequence:
    prompt = tuple(range(prompt_tokens))
    request = GenerationRequest(prompt, SamplingParams(), lambda chunk: None, f"r{number}")
    return Sequence(number, request, list(prompt), max_tokens)


def play(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Run one step; returns (sequence number, tokens) and lets every sampling sequence grow by one token."""
    scheduled = scheduler.schedule()
    for item in scheduled:
        item.sequence.num_computed += item.num_tokens
        if item.sequence.num_computed == len(item.sequence.token_ids):
            item.sequence.token_ids.append(7)
    return [(item.sequence.number, item.num_tokens) for item in scheduled]


def test_a_long_prompt_is_prefilled_in_chunks_then_decodes():
    scheduler = Scheduler(PagePool(10, 4), max_num_seqs=4, max_num_batched_tokens=6)
    scheduler.add(make_sequence(0, 14))
    assert [play(scheduler) for _ in range(5)] == [[(0, 6)], [(0, 6)], [(0, 2)], [(0, 1)], [(0, 1)]]


def test_decoding_comes_before_the_prefill_of_newcomers():
    scheduler = Scheduler(PagePool(20, 4), max_num_seqs=4, max_num_batched_tokens=6)
    scheduler.add(make_sequence(0, 3))
    play(scheduler)
    scheduler.add(make_sequence(1, 12))
    assert play(scheduler) == [(0, 1), (1, 5)]
    assert play(scheduler) == [(0, 1), (1, 5)]
    assert play(scheduler) == [(0, 1), (1, 2)]
    assert play(scheduler) == [(0, 1), (1, 1)]


def test_no_more_sequences_run_than_allowed():
    scheduler = Scheduler(PagePool(20, 4), max_num_seqs=2, max_num_batched_tokens=100)
    for number in range(3):
        scheduler.add(make_sequence(number, 2))
    assert play(scheduler) == [(0, 2), (1, 2)]
    scheduler.finish(scheduler.running[0])
    assert play(scheduler) == [(1, 1), (2, 2)]


def test_the_youngest_gives_way_when_pages_run_out_and_starts_over():
    pool = PagePool(4, 2)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=100)
    scheduler.add(make_sequence(0, 4))
    scheduler.add(make_sequence(1, 4))
    assert play(scheduler) == [(0, 4), (1, 4)]
    assert play(scheduler) == [(0, 1)], "sequence 1 gives its two pages back; sequence 0 takes one of them"
    assert [s.number for s in scheduler.waiting] == [1]
    assert scheduler.waiting[0].num_computed == 0
    assert len(scheduler.waiting[0].token_ids) == 5, "the token it had already generated is kept"
    scheduler.finish(scheduler.running[0])
    assert play(scheduler) == [(1, 5)]


@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    num_pages=st.integers(8, 24),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_everyone_finishes_and_no_page_is_lost_or_shared(prompts, num_pages, max_num_seqs, budget):
    page_size, max_tokens = 4, 6
    pool = PagePool(num_pages, page_size)
    scheduler = Scheduler(pool, max_num_seqs, budget)
    for number, prompt in enumerate(prompts):
        scheduler.add(make_sequence(number, prompt, max_tokens))
    finished = set()
    for _ in range(4000):
        if not scheduler.has_work:
            break
        scheduled = scheduler.schedule()
        assert scheduled, "work was left but nothing was scheduled"
        assert sum(item.num_tokens for item in scheduled) <= budget
        assert len(scheduler.running) <= max_num_seqs
        owned = [page for sequence in scheduler.running for page in sequence.pages]
        assert len(owned) == len(set(owned)), "two sequences own one page"
        assert len(owned) + pool.num_free == num_pages, "a page was lost"
        for item in scheduled:
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            assert pool.pages_for(sequence.num_computed) <= len(sequence.pages)
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(1)
                if sequence.num_generated >= max_tokens:
                    scheduler.finish(sequence)
                    finished.add(sequence.number)
    assert finished == set(range(len(prompts)))
    assert pool.num_free == num_pages


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_round_up(tokens, pages):
    assert PagePool(4, 4).pages_for(tokens) == pages
