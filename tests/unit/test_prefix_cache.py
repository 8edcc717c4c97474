"""The prefix cache against memory that remembers what it holds: nobody ever reads another text's state."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import prefix_cache
from twofold.engine.page_tree import CachedPage, PageTree
from twofold.engine.prefix_cache import CachingPool
from twofold.engine.scheduler import Scheduler
from twofold.engine.sequences import Sequence

PAGE = 4
Text = tuple[int, ...]
"""Tokens from a begin: what a place in the memory was computed from."""


class Memory:
    """See `StateMemory`. Each position of a page, and each record, holds the whole text that led to it."""

    def __init__(self, num_pages: int, num_records: int) -> None:
        self.pages: list[list[Text]] = [[()] * PAGE for _ in range(num_pages)]
        self.records: list[Text] = [(-1,)] * num_records
        self.num_copies = 0

    def fork_page(self, from_page: int, to_page: int) -> None:
        self.pages[to_page] = list(self.pages[from_page])
        self.num_copies += 1

    def fork_record(self, from_record: int, to_record: int) -> None:
        self.records[to_record] = self.records[from_record]

    def read_page(self, page: int) -> bytes:
        return repr(self.pages[page]).encode()

    def write_page(self, page: int, data: bytes) -> None:
        self.pages[page] = eval(data)  # of this class's own text

    def read_record(self, record: int) -> bytes:
        return repr(self.records[record]).encode()

    def write_record(self, record: int, data: bytes) -> None:
        self.records[record] = eval(data)


@dataclass
class Play:
    """An engine that computes texts instead of numbers, and looks at all that a token would attend to."""

    num_pages: int = 32
    num_records: int | None = None
    num_snapshots: int = 0
    max_num_seqs: int = 4
    budget: int = 64
    pool: CachingPool = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self.num_pages, (self.num_records or 0) + self.num_snapshots)
        self.pool = CachingPool(
            self.num_pages, PAGE, self.num_records, memory=self.memory, cost=lambda begin, end: float(end - begin),
            num_snapshots=self.num_snapshots,
        )  # fmt: skip
        self.scheduler = Scheduler(self.pool, self.max_num_seqs, self.budget)
        self.num_computed = 0
        self.num_added = 0

    def add(
        self, prompt: Seq[int], max_tokens: int = 1, *, salt: str = "", ends: Text = (), **sampling: int
    ) -> Sequence:
        request = GenerationRequest(
            tuple(prompt), SamplingParams(**sampling), lambda chunk: None, f"r{self.num_added}", cache_salt=salt,
            turn_ends=ends,
        )  # fmt: skip
        sequence = Sequence(self.num_added, request, list(prompt), max_tokens)
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """(sequence, tokens) of what was computed. Answers are what the text says, whoever computes them."""
        scheduled = self.scheduler.schedule()
        assert scheduled or not self.scheduler.has_work, "work was left but nothing was scheduled"
        self.check()
        for sequence, num_tokens, samples in scheduled:
            self.compute(sequence, num_tokens)
            if samples:
                sequence.token_ids.append(sum(sequence.token_ids) % 3)
                if sequence.num_generated >= sequence.max_tokens:
                    self.scheduler.finish(sequence)
        self.num_computed += sum(item.num_tokens for item in scheduled)
        return [(item.sequence.number, item.num_tokens) for item in scheduled]

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        begin, end = sequence.num_computed, sequence.num_computed + num_tokens
        text, salt = tuple(sequence.token_ids), hash(sequence.request.cache_salt)
        for position in range(begin):
            seen = self.memory.pages[sequence.pages[position // PAGE]][position % PAGE]
            assert seen == (salt, *text[: position + 1]), f"position {position} is of another text"
        if self.num_records is not None:
            assert sequence.record is not None
            before = self.memory.records[sequence.record]
            assert begin == 0 or before == (salt, *text[:begin]), "the record is of another text"
            self.memory.records[sequence.record] = (salt, *text[:end])
        for position in range(begin, end):
            page = sequence.pages[position // PAGE]
            owners = [s for s in self.scheduler.running if page in s.pages]
            assert owners == [sequence], "a shared page is written to"
            self.memory.pages[page][position % PAGE] = (salt, *text[: position + 1])
        sequence.num_computed = end

    def check(self) -> None:
        """Every page is free, cached or somebody's; whoever runs has what it needs."""
        running = self.scheduler.running
        held = {page for sequence in running for page in sequence.pages}
        assert len(held) + self.pool.num_free == self.num_pages, "a page was lost"
        for sequence in running:
            assert len(set(sequence.pages)) == len(sequence.pages)
            assert len(sequence.pages) * PAGE >= len(sequence.token_ids)
            assert [page.page for page in sequence.cached] == sequence.pages[: len(sequence.cached)]
        if self.num_records is not None:
            records = [sequence.record for sequence in running]
            assert len(set(records)) == len(records) == self.num_records - self.pool.num_free_records

    def run(self) -> list[list[tuple[int, int]]]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
        self.check()
        assert self.pool.num_free == self.num_pages
        return steps


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots for texts as short as these."""
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", 16)
    monkeypatch.setattr(prefix_cache, "_WORTH_A_STEP", 8)
    monkeypatch.setattr(prefix_cache, "_WORTH_A_SNAPSHOT", 3)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_text_ever_meets_anothers_state(data: st.DataObject) -> None:
    """Texts that begin alike, cancelled, preempted, salted, in any batch, in memory that is always too small."""
    draw = data.draw
    with_records = draw(st.booleans())
    play = Play(
        num_pages=draw(st.integers(10, 30)),
        num_records=draw(st.integers(1, 4)) if with_records else None,
        num_snapshots=draw(st.integers(1, 5)) if with_records else 0,
        max_num_seqs=draw(st.integers(1, 5)),
        budget=draw(st.integers(1, 24)),
    )
    rng = random.Random(draw(st.integers(0, 2**32)))
    stems = [[rng.randrange(3) for _ in range(rng.randrange(1, 24))] for _ in range(3)]
    answers: list[Sequence] = []
    for _ in range(150):
        event = rng.random()
        if event < 0.25 and len(answers) < 14:
            before = rng.choice(answers).token_ids if answers and rng.random() < 0.5 else rng.choice(stems)
            keep = len(before) if rng.random() < 0.6 else rng.randrange(len(before) + 1)
            prompt = [*before[:keep], *(rng.randrange(3) for _ in range(rng.randrange(1, 9)))][:32]
            options = {"prompt_logprobs": 0} if rng.random() < 0.1 else {}
            ends = tuple(sorted(rng.sample(range(1, 33), rng.randrange(3))))
            salt = rng.choice(("", "", "other"))
            answers.append(play.add(prompt, rng.randrange(1, 8), salt=salt, ends=ends, **options))
        elif event < 0.3 and play.scheduler.running:
            play.scheduler.finish(rng.choice(play.scheduler.running), keep=rng.random() < 0.7)
        elif play.scheduler.has_work:
            play.step()
    play.run()
    for sequence in answers:
        assert 0 <= sequence.num_cached < sequence.num_prompt_tokens
    assert play.pool.num_hits == sum(sequence.num_cached for sequence in answers)


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (range(21), range(21), 20),  # all but the last token, which lies in a tail
        (range(20), range(20), 16),  # a last page that is full is computed again
        (range(21), (*range(9), 99, *range(10, 21)), 8),  # an edit: the full pages before it
        (range(21), (*range(21), 0, 50, 51), 22),  # the next turn: the answer's tail, too
        (range(21), (99, *range(1, 21)), 0),
        (range(3), range(3), 0),  # less than a page
    ],
)
def test_what_a_second_prompt_finds(first: Seq[int], second: Seq[int], cached: int) -> None:
    play = Play()
    play.add(first, 2)
    play.run()
    again = play.add(second)
    play.run()
    assert again.num_cached == cached
    assert (play.pool.num_queries, play.pool.num_hits) == (len(first) + len(second), cached)


def test_another_salt_or_a_question_about_every_token_finds_nothing() -> None:
    play = Play()
    play.add(range(20))
    play.run()
    others = [play.add(range(20), salt="other"), play.add(range(20), prompt_logprobs=1)]
    play.run()
    assert [sequence.num_cached for sequence in others] == [0, 0]


@pytest.mark.parametrize("with_records", [False, True])
def test_what_prompts_have_in_common_is_computed_once_though_they_come_together(with_records: bool) -> None:
    play = Play(
        num_pages=64, num_records=8 if with_records else None, num_snapshots=8, max_num_seqs=8, budget=16
    )
    for number in range(6):
        play.add([*range(41), 50 + number])
    play.run()
    # 40 tokens in common; each has two of its own.
    assert play.num_computed == 40 + 6 * 2


def test_a_prompt_takes_up_what_a_longer_one_computes_beside_it() -> None:
    """It came with pages of its own to compute, and meets the other's."""
    play = Play(num_pages=64, budget=8)
    play.add(range(40))
    play.step()
    play.step()
    late = play.add([*range(40), 60, 61])
    steps = play.run()
    assert late.num_cached == 40
    assert steps[-1] == [(1, 2)]


def test_records_go_as_far_as_the_last_snapshot() -> None:
    play = Play(num_records=2, num_snapshots=8)
    play.add(range(30), 2, ends=(14, 26))
    play.run()
    found = {}
    for length in (12, 13, 20, 26, 30):
        sequence = play.add([*range(length), 99])
        found[length] = play.pool._find(sequence).end
        play.scheduler.finish(sequence)
    # Cuts at the whole pages before 14 and 26, and one where it ended, of 31 tokens.
    assert found == {12: 12, 13: 12, 20: 12, 26: 24, 30: 24}
    ended = play.add([*range(30), 0, 1, 2])  # the first of an answer of two tokens is 0
    play.run()
    assert ended.num_cached == 31


def test_the_last_snapshot_makes_room_and_takes_its_pages_worth_with_it() -> None:
    play = Play(num_pages=40, num_records=1, num_snapshots=1)
    texts = [play.add(range(20), 2).token_ids, play.add(range(100, 120), 2).token_ids]
    play.run()
    assert [play.add([*text[:21], 9]).num_found for text in texts] == [0, 21]
    # What has no snapshot any more goes first, though there are older pages with one.
    evicted = play.pool._tree.evict()
    assert evicted is not None
    assert play.memory.pages[evicted.page][0][1] == 0


def test_a_preempted_request_takes_up_what_is_left_of_it() -> None:
    play = Play(num_pages=12, max_num_seqs=2, budget=64)
    play.add(range(16), 24)
    late = play.add(range(50, 62), 24)
    play.run()
    assert late.was_preempted
    assert late.num_cached == 0, "its own, which nobody counts"
    assert play.num_computed < 16 + 24 + 2 * 12 + 24


# ---- which page goes -----------------------------------------------------------------------------------------------


class SlowTree:
    """GreedyDual by looking at everything."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.pages: dict[bytes, CachedPage] = {}
        self.order: dict[bytes, int] = {}
        self.worth: dict[bytes, float] = {}

    def used(self, page: CachedPage, cost: float) -> None:
        self.pages[page.digest] = page
        self.worth[page.digest] = self.clock + cost

    def evict(self) -> set[bytes]:
        """Those of which one may go."""
        parents = {page.parent.digest for page in self.pages.values() if page.parent is not None}
        leaves = [p.digest for p in self.pages.values() if p.refs == 0 and p.digest not in parents]
        least = min((self.worth[digest] for digest in leaves), default=0.0)
        return {digest for digest in leaves if self.worth[digest] == least}


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_page_that_goes_is_the_one_a_search_of_all_would_name(seed: int) -> None:
    rng = random.Random(seed)
    tree, slow = PageTree(lambda begin, end: (end - begin) * (1 + end / 8)), SlowTree()
    held: list[CachedPage] = []
    for number in range(200):
        pages = list(slow.pages.values())
        event = rng.random()
        if event < 0.4:
            parent = rng.choice([*pages, None]) if pages else None
            end = PAGE * (1 + (parent.end // PAGE if parent else 0))
            page = tree.add(b"%d" % number, parent, number, end)
            slow.used(page, PAGE * (1 + end / 8))
        elif event < 0.6 and pages:
            path = [rng.choice(pages)]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            for page in path:
                tree.hold(page)
            held += path
        elif event < 0.75 and held:
            while held:  # from the deepest of each path on, as sequences do
                page = held.pop(0)
                tree.let_go(page)
                if page.refs == 0:
                    slow.used(page, PAGE * (1 + page.end / 8))
        elif event < 0.95:
            allowed = slow.evict()
            gone = tree.evict()
            assert (gone is None) == (not allowed)
            if gone is not None:
                assert gone.digest in allowed
                slow.clock = max(slow.clock, slow.worth[gone.digest])
                del slow.pages[gone.digest]
        assert tree.num_unused == sum(page.refs == 0 for page in slow.pages.values())
        assert all(tree.find(digest) is page for digest, page in slow.pages.items())


def test_deep_pages_outlive_shallow_ones_and_old_ones_do_not_outlive_for_ever() -> None:
    tree = PageTree(lambda begin, end: float(end))
    cheap, dear = tree.add(b"cheap", None, 0, 4), tree.add(b"dear", None, 1, 40)
    assert tree.evict() is cheap
    for number in range(12):  # each as cheap, and younger
        tree.add(b"%d" % number, None, 2 + number, 4)
        gone = tree.evict()
        if gone is dear:
            break
    assert gone is dear
