"""The scheduler and its page pool: scheduling order, and that no page is ever lost or shared."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.api.types import GenerationRequest, LoadedAdapter, SamplingParams
from twofold.engine.kv_cache import PagePool
from twofold.engine.scheduler import Scheduler
from twofold.step.batch import StepBatch
from twofold.step.prefill_budget import MIN_TOKENS, PrefillBudget
from twofold.step.sequences import Sequence


def make_sequence(
    number: int,
    prompt_tokens: int,
    max_tokens: int = 8,
    priority: int = 0,
    adapter: int | None = None,
    pictures: tuple[tuple[int, int], ...] = (),
) -> Sequence:
    prompt = tuple(range(prompt_tokens))
    loaded = None if adapter is None else LoadedAdapter(f"adapter-{adapter}", adapter, "")
    request = GenerationRequest(
        prompt, SamplingParams(), lambda chunk: None, f"r{number}", priority=priority, adapter=loaded
    )
    return Sequence(number, request, list(prompt), max_tokens, bidirectional=pictures)


def play(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Run one step; returns (sequence number, tokens) and lets every sampling sequence grow by one token."""
    scheduled = scheduler.schedule().items
    for item in scheduled:
        item.sequence.num_computed += item.num_tokens
        if item.sequence.num_computed == len(item.sequence.token_ids):
            item.sequence.token_ids.append(7)
    return [(item.sequence.number, item.num_tokens) for item in scheduled]


def test_a_long_prompt_is_prefilled_in_chunks_then_decodes():
    scheduler = Scheduler(PagePool(10, 4), max_num_seqs=4, max_num_batched_tokens=6)
    scheduler.add(make_sequence(0, 14))
    assert [play(scheduler) for _ in range(5)] == [[(0, 6)], [(0, 6)], [(0, 2)], [(0, 1)], [(0, 1)]]


def test_decoding_precedes_the_prefill_of_new_requests():
    scheduler = Scheduler(PagePool(20, 4), max_num_seqs=4, max_num_batched_tokens=6)
    scheduler.add(make_sequence(0, 3))
    play(scheduler)
    scheduler.add(make_sequence(1, 12))
    assert play(scheduler) == [(0, 1), (1, 5)]
    assert play(scheduler) == [(0, 1), (1, 5)]
    assert play(scheduler) == [(0, 1), (1, 2)]
    assert play(scheduler) == [(0, 1), (1, 1)]


def test_a_schedule_keeps_its_version_only_while_the_same_sequences_decode():
    scheduler = Scheduler(PagePool(20, 4), max_num_seqs=4, max_num_batched_tokens=6)
    batch, versions = StepBatch(), []

    def step() -> list[int]:
        schedule = scheduler.schedule()
        versions.append(schedule.version)
        reused, rebuilt = batch.of(schedule), StepBatch().of(schedule)
        assert reused.token_ids.tolist() == rebuilt.token_ids.tolist()
        assert reused.positions == rebuilt.positions == reused.meta.positions.tolist()
        assert reused.meta.page_tables.tolist() == rebuilt.meta.page_tables.tolist()
        for item in schedule.items:
            item.sequence.num_computed += item.num_tokens
            if item.samples:
                item.sequence.token_ids.append(item.sequence.number)
        return [item.sequence.number for item in schedule.items]

    first, second = make_sequence(0, 3), make_sequence(1, 3)
    scheduler.add(first)
    scheduler.add(second)
    assert [step() for _ in range(4)] == [[0, 1]] * 4, "a prompt, then decode steps that begin a page"
    scheduler.invalidate_schedule()
    assert [step() for _ in range(2)] == [[0, 1]] * 2
    scheduler.add(make_sequence(2, 9))
    assert [step() for _ in range(4)] == [[0, 1, 2]] * 4, "chunks of 4, 4 and 1 tokens, then a decode step"
    scheduler.finish(second)
    assert [step() for _ in range(2)] == [[0, 2]] * 2
    kept = [after == before for before, after in itertools.pairwise(versions)]
    assert kept == [False, True, True, False, True, False, False, False, False, False, True]


def test_a_step_computes_a_bidirectional_picture_whole():
    """Fewer tokens before it, more if it is longer than a step, and a step without other prompts if it does not fit."""
    scheduler = Scheduler(PagePool(30, 4), max_num_seqs=4, max_num_batched_tokens=8)
    scheduler.add(make_sequence(0, 24, pictures=((3, 12), (14, 18), (18, 21))))
    assert [play(scheduler) for _ in range(5)] == [[(0, 3)], [(0, 9)], [(0, 6)], [(0, 6)], [(0, 1)]]
    scheduler.add(make_sequence(1, 11, pictures=((1, 8),)))
    scheduler.add(make_sequence(2, 4))
    assert [play(scheduler) for _ in range(4)] == [
        [(0, 1), (1, 1), (2, 4)], [(0, 1), (2, 1), (1, 7)], [(0, 1), (2, 1), (1, 3)], [(0, 1), (1, 1), (2, 1)],
    ]  # fmt: skip


PICTURES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(PICTURES, min_size=1, max_size=4), st.integers(5, 24))
def test_no_step_cuts_a_bidirectional_picture(prompts: list[list[tuple[int, int]]], step_tokens: int) -> None:
    scheduler = Scheduler(PagePool(200, 4), max_num_seqs=4, max_num_batched_tokens=step_tokens)
    sequences = []
    for number, parts in enumerate(prompts):
        ends = list(itertools.accumulate(text + picture for text, picture in parts))
        pictures = tuple((end - picture, end) for (_, picture), end in zip(parts, ends, strict=True))
        sequences.append(make_sequence(number, ends[-1], pictures=pictures))
        scheduler.add(sequences[-1])
    for _ in range(400):
        before = {sequence.number: sequence.num_computed for sequence in sequences}
        scheduled = play(scheduler)
        prefilled = [
            count for number, count in scheduled if before[number] < sequences[number].num_prompt_tokens
        ]
        assert sum(count for _, count in scheduled) <= step_tokens or len(prefilled) == 1
        assert all(count > 0 for _, count in scheduled)
        for sequence in sequences:
            assert not any(begin < sequence.num_computed < end for begin, end in sequence.bidirectional)
        if all(sequence.is_decoding for sequence in sequences):
            return
    pytest.fail("some prompt was never computed")


def test_no_more_sequences_run_than_allowed():
    scheduler = Scheduler(PagePool(20, 4), max_num_seqs=2, max_num_batched_tokens=100)
    for number in range(3):
        scheduler.add(make_sequence(number, 2))
    assert play(scheduler) == [(0, 2), (1, 2)]
    scheduler.finish(scheduler.running[0])
    assert play(scheduler) == [(1, 1), (2, 2)]


def test_the_newest_request_is_preempted_when_pages_run_out():
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


@pytest.mark.parametrize(("by_priority", "order"), [(True, [2, 1, 0]), (False, [0, 1, 2])])
def test_priority_decides_the_order_of_admission_and_preemption(by_priority, order):
    pool = PagePool(6, 2)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=8, by_priority=by_priority)
    for number, priority in enumerate((5, 0, -5)):
        scheduler.add(make_sequence(number, 4, priority=priority))
    assert play(scheduler) == [(order[0], 4), (order[1], 4)]
    assert play(scheduler) == [(order[0], 1), (order[1], 1)], "the last two pages: none are left for a third"
    play(scheduler)
    assert play(scheduler) == [(order[0], 1), (order[2], 4)], "who comes second gives its three pages back"
    assert [s.number for s in scheduler.waiting] == [1]


@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(-1, 1)), min_size=1, max_size=8),
    by_priority=st.booleans(),
    num_pages=st.integers(8, 24),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 12),
    num_records=st.integers(1, 4),
    cancelled=st.sets(st.integers(0, 7)),
)
@settings(max_examples=60, deadline=None)
def test_every_request_finishes_and_no_page_or_record_is_lost_or_shared(
    prompts, by_priority, num_pages, max_num_seqs, budget, num_records, cancelled
):
    page_size, max_tokens = 4, 6
    pool = PagePool(num_pages, page_size, num_records)
    scheduler = Scheduler(pool, max_num_seqs, budget, by_priority=by_priority)
    for number, (prompt, priority) in enumerate(prompts):
        scheduler.add(make_sequence(number, prompt, max_tokens, priority))
    finished = set()
    for _ in range(4000):
        if not scheduler.has_work:
            break
        scheduled = scheduler.schedule().items
        assert scheduled, "work was left but nothing was scheduled"
        assert sum(item.num_tokens for item in scheduled) <= budget
        assert len(scheduler.running) <= max_num_seqs
        owned = [page for sequence in scheduler.running for page in sequence.pages]
        assert len(owned) == len(set(owned)), "two sequences own one page"
        assert len(owned) + pool.num_free == num_pages, "a page was lost"
        records = [sequence.record for sequence in scheduler.running]
        assert len(set(records)) == len(records) <= num_records, "two sequences own one record"
        assert None not in records
        assert len(records) + pool.num_free_records == num_records, "a record was lost"
        assert all(sequence.record is None for sequence in scheduler.waiting)
        for item in scheduled:
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            assert pool.pages_for(sequence.num_computed) <= len(sequence.pages)
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(1)
                if sequence.num_generated >= (1 if sequence.number in cancelled else max_tokens):
                    scheduler.finish(sequence)
                    finished.add(sequence.number)
    assert finished == set(range(len(prompts)))
    assert pool.num_free == num_pages
    assert pool.num_free_records == num_records


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_round_up(tokens, pages):
    assert PagePool(4, 4).pages_for(tokens) == pages


# ---- scheduling order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_long", [1, 8])
def test_a_short_prompt_does_not_wait_for_long_ones(num_long):
    scheduler = Scheduler(PagePool(1000, 16), max_num_seqs=32, max_num_batched_tokens=64)
    for number in range(num_long):
        scheduler.add(make_sequence(number, 1000))
    for _ in range(10):
        play(scheduler)
    scheduler.add(make_sequence(100, 40))
    steps = [dict(play(scheduler)) for _ in range(2)]
    assert [step.get(100) for step in steps] == [32, 8], "half of each step's tokens until it is through"
    assert all(sum(step.values()) == 64 for step in steps), "what it leaves is the long ones'"


def test_short_prompts_use_at_most_half_of_the_budget_of_the_oldest():
    scheduler = Scheduler(PagePool(1000, 16), max_num_seqs=32, max_num_batched_tokens=64)
    scheduler.add(make_sequence(0, 1000))
    given = 0
    for number in range(1, 21):  # a new one in every step: it never ends
        scheduler.add(make_sequence(number, 60))
        given += dict(play(scheduler)).get(0, 0)
        for sequence in list(scheduler.running):
            if sequence.is_decoding:
                scheduler.finish(sequence)
    assert given >= 20 * 32


def test_a_step_uses_few_adapters_and_others_pass_a_request_that_waits_for_its_adapter():
    scheduler = Scheduler(PagePool(100, 16), max_num_seqs=8, max_num_batched_tokens=64, max_adapters=2)
    for number, adapter in enumerate((0, 1, 2, 1, None)):
        scheduler.add(make_sequence(number, 8, adapter=adapter))
    assert sorted(number for number, _ in play(scheduler)) == [0, 1, 3, 4]
    scheduler.finish(next(each for each in scheduler.running if each.number == 1))
    assert 2 not in dict(play(scheduler)), "another request still uses adapter 1"
    scheduler.finish(next(each for each in scheduler.running if each.number == 3))
    assert dict(play(scheduler))[2] == 8


def test_a_request_that_waits_for_its_adapter_is_overtaken_for_a_limited_time():
    """Requests of another adapter never stop coming."""
    scheduler = Scheduler(PagePool(100, 16), max_num_seqs=2, max_num_batched_tokens=64, max_adapters=1)
    scheduler.add(make_sequence(0, 8, adapter=0))
    play(scheduler)
    other = make_sequence(1, 8, adapter=1)
    scheduler.add(other)
    for number in range(2, 200):
        scheduler.add(make_sequence(number, 8, adapter=0))
        play(scheduler)
        if other in scheduler.running:
            return
        for sequence in [each for each in scheduler.running if each.num_generated > 3]:
            scheduler.finish(sequence)
    pytest.fail("it was never admitted")


def test_a_prompt_without_room_is_overtaken_for_a_limited_time():
    """Short requests never stop coming and could always take the pages that a long one waits for."""
    pool = PagePool(20, 16)
    scheduler = Scheduler(pool, max_num_seqs=8, max_num_batched_tokens=64)
    long = make_sequence(2, 16 * 16)
    for sequence in (make_sequence(0, 60), make_sequence(1, 60), long):
        scheduler.add(sequence)
    number, passed, computed = 3, 0, 0
    while long not in scheduler.running:
        while sum(s is not long for s in scheduler.waiting) < 3:
            scheduler.add(make_sequence(number, 60))
            number += 1
        step = play(scheduler)
        assert step, "work was left but nothing was scheduled"
        computed += sum(count for _, count in step)
        for sequence in list(scheduler.running):
            if sequence.num_generated == 6:
                passed += sequence.number > 2
                scheduler.finish(sequence)
        assert computed < 10 * 256, "the long prompt starves"
    assert passed >= 3, "others were served in the meantime"


# ---- on a virtual clock ------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Steps that cost so much: a clock for the scheduler to be watched by."""

    scheduler: Scheduler
    budget: PrefillBudget
    decode_s: float
    token_s: float
    now_s: float = 0.0
    num_steps: int = 0
    num_prefilled: int = 0
    first_tokens: dict[int, int] = field(default_factory=dict)
    """Prompt tokens computed when each had its first token."""
    gaps_s: list[float] = field(default_factory=list)
    """Durations of steps in which at least one sequence decoded."""

    def step(self) -> None:
        scheduled = self.scheduler.schedule().items
        assert scheduled, "work was left but nothing was scheduled"
        decoding = sum(item.sequence.is_decoding for item in scheduled)
        prefill = sum(item.num_tokens for item in scheduled) - decoding
        took_s = self.decode_s + self.token_s * prefill
        self.now_s += took_s
        self.num_steps += 1
        self.num_prefilled += prefill
        self.budget.observe(prefill, decoding, took_s)
        if decoding:
            self.gaps_s.append(took_s)
        for item in scheduled:
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            if item.samples:
                sequence.token_ids.append(1)
                self.first_tokens.setdefault(sequence.number, self.num_prefilled)
                if sequence.num_generated == sequence.max_tokens:
                    self.scheduler.finish(sequence)


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([0.0, 0.02, 0.1]), st.sampled_from([3, 50, 400, 4000]), st.integers(1, 60)),
        min_size=1,
        max_size=30,
    ),
    decode_ms=st.sampled_from([1.0, 10.0, 500.0]),
    token_ms=st.sampled_from([0.01, 0.2, 10.0]),
    num_pages=st.sampled_from([260, 2000]),
)
@settings(max_examples=40, deadline=None)
def test_no_request_starves_and_stream_pauses_are_bounded(arrivals, decode_ms, token_ms, num_pages):
    decode_s, token_s = decode_ms * 1e-3, token_ms * 1e-3
    budget = PrefillBudget(512)
    scheduler = Scheduler(PagePool(num_pages, 16), 32, 512, budget)
    machine = Machine(scheduler, budget, decode_s, token_s)
    ahead, waiting = {}, []
    due_s = 0.0
    for number, (pause_s, prompt_tokens, max_tokens) in enumerate(arrivals):
        due_s += pause_s
        waiting.append((due_s, make_sequence(number, prompt_tokens, max_tokens)))
    while waiting or scheduler.has_work:
        while waiting and (waiting[0][0] <= machine.now_s or not scheduler.has_work):
            sequence = waiting.pop(0)[1]
            scheduler.add(sequence)
            older = [s for s in (*scheduler.running, *scheduler.waiting) if not s.is_decoding]
            ahead[sequence.number] = machine.num_prefilled + 2 * sum(s.num_uncomputed for s in older)
        machine.step()
        assert machine.num_steps < 100_000
    assert set(machine.first_tokens) == set(range(len(arrivals)))
    if num_pages == 2000 and sum(16 + p + m for _, p, m in arrivals) <= 2000 * 16:
        # Pages for all, so nothing is computed twice: the half in order of arrival bounds every wait.
        late = {n: (got, ahead[n]) for n, got in machine.first_tokens.items() if got > ahead[n] + 512}
        assert not late
    limit_s = max(4 * decode_s, 0.05, decode_s + MIN_TOKENS * token_s)
    assert max(machine.gaps_s, default=0.0) <= limit_s * 1.001
