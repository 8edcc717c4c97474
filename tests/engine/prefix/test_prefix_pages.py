"""The prefix cache against memory that records its contents: no sequence reads the state of another prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.engine.prefix import cache as prefix_cache
from twofold.step.page_tree import CachedPage, PageTree
from twofold.step.sequences import Sequence

from tests.engine.prefix.play import PAGE, Play


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables snapshots for prompts as short as these."""
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", 16)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SPLIT", 8)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SNAPSHOT", 3)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_text_ever_meets_anothers_state(data: st.DataObject) -> None:
    """Prompts with common prefixes, cancelled, preempted, salted, in any batch, in memory that is always too small."""
    check_random_texts(data.draw)


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_files_on_disk_do_not_either(data: st.DataObject) -> None:
    """The same run twice; the second hits the files of the first. The files' limit is small enough for evictions."""
    with TemporaryDirectory() as directory:
        for _ in range(2):
            check_random_texts(data.draw, Path(directory), data.draw(st.sampled_from((2_000, 20_000))))


def check_random_texts(
    draw: Callable[[st.SearchStrategy[Any]], Any], directory: Path | None = None, max_bytes: int = 0
) -> None:
    with_records = draw(st.booleans())
    play = Play(
        directory=directory,
        max_bytes=max_bytes,
        key=b"records" if with_records else b"",
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
    play.pool.close()
    if directory is not None:
        assert sum(path.stat().st_size for path in directory.iterdir()) <= max_bytes


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
def test_a_common_prefix_of_simultaneous_prompts_is_computed_once(with_records: bool) -> None:
    play = Play(
        num_pages=64, num_records=8 if with_records else None, num_snapshots=8, max_num_seqs=8, budget=16
    )
    for number in range(6):
        play.add([*range(41), 50 + number])
    play.run()
    # 40 tokens in common; each has two of its own.
    assert play.num_computed == 40 + 6 * 2


def test_a_prompt_reuses_what_a_longer_concurrent_one_computes() -> None:
    """The prompt starts with its own pages to compute, then reaches the other's."""
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
    assert [play.add([*text[:21], 9]).num_lookup_hits for text in texts] == [0, 21]
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
    assert late.num_cached == 0, "its own pages are no cache hits"
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
        """Digests of the pages that may be evicted."""
        parents = {page.parent.digest for page in self.pages.values() if page.parent is not None}
        leaves = [p.digest for p in self.pages.values() if p.refs == 0 and p.digest not in parents]
        least = min((self.worth[digest] for digest in leaves), default=0.0)
        return {digest for digest in leaves if self.worth[digest] == least}


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_the_evicted_page_is_that_of_an_exhaustive_search(seed: int) -> None:
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
            tree.touch(page)
            slow.used(page, PAGE * (1 + end / 8))
        elif event < 0.6 and pages:
            path = [rng.choice(pages)]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            for page in path:
                tree.use_page(page)
            held += path
        elif event < 0.75 and held:
            while held:  # from the deepest of each path on, as sequences do
                page = held.pop(0)
                tree.release_page(page)
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

    def add(digest: bytes, end: int) -> CachedPage:
        page = tree.add(digest, None, 0, end)
        tree.touch(page)
        return page

    cheap, dear = add(b"cheap", 4), add(b"dear", 40)
    assert tree.evict() is cheap
    evicted = []
    for number in range(12):  # each as cheap, and younger
        add(b"%d" % number, 4)
        evicted.append(tree.evict())
    assert dear not in evicted[:8]
    assert dear in evicted
