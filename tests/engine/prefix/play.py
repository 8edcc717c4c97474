"""The scheduler and the prefix cache over memory that holds strings instead of numbers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine.prefix.cache import CachingPool
from twofold.engine.prefix.store import PrefixStore
from twofold.engine.scheduler import Scheduler
from twofold.step.sequences import Sequence

PAGE = 4
Text = tuple[int, ...]
"""Tokens from a begin: what a place in the memory was computed from."""


_TEXTS: list[Text] = []
_NUMBERS: dict[Text, int] = {}


def _as_bytes(text: Text) -> bytes:
    """Eight, whatever it is."""
    if text not in _NUMBERS:
        _NUMBERS[text] = len(_TEXTS)
        _TEXTS.append(text)
    return _NUMBERS[text].to_bytes(8)


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
        return b"".join(map(_as_bytes, self.pages[page]))

    def write_page(self, page: int, data: bytes) -> None:
        assert len(data) == 8 * PAGE
        self.pages[page] = [_TEXTS[int.from_bytes(data[i : i + 8])] for i in range(0, len(data), 8)]

    def read_record(self, record: int) -> bytes:
        return _as_bytes(self.records[record])

    def write_record(self, record: int, data: bytes) -> None:
        self.records[record] = _TEXTS[int.from_bytes(data)]


@dataclass
class Play:
    """An engine that computes strings instead of numbers, and reads all that a token would attend to."""

    num_pages: int = 32
    num_records: int | None = None
    num_snapshots: int = 0
    max_num_seqs: int = 4
    budget: int = 64
    directory: Path | None = None
    key: bytes = b""
    max_bytes: int = 1 << 30
    pool: CachingPool = field(init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self.num_pages, (self.num_records or 0) + self.num_snapshots)
        self.pool = CachingPool(
            self.num_pages,
            PAGE,
            self.num_records,
            memory=self.memory,
            cost=lambda begin, end: float(end - begin),
            num_snapshots=self.num_snapshots,
            key=self.key,
            store=None if self.directory is None else PrefixStore(self.directory, self.max_bytes),
        )
        self.scheduler = Scheduler(self.pool, self.max_num_seqs, self.budget)
        self.num_computed = 0
        self.num_added = 0

    def add(
        self, prompt: Seq[int], max_tokens: int = 1, *, salt: str = "", ends: Text = (), **sampling: int
    ) -> Sequence:
        request = GenerationRequest(
            tuple(prompt),
            SamplingParams(**sampling),
            lambda chunk: None,
            f"r{self.num_added}",
            cache_salt=salt,
            turn_ends=ends,
        )
        sequence = Sequence(self.num_added, request, list(prompt), max_tokens)
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[int, int]]:
        """Runs a step; returns (sequence, tokens) of what was computed. Answers depend on the text alone."""
        scheduled = self.scheduler.schedule().items
        if not scheduled and self.scheduler.has_work:
            assert self.pool.wait_for_files(10), "work was left but nothing was scheduled"
        self.check()
        for sequence, num_tokens, samples, *_ in scheduled:
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
        """Checks that every page is free, cached or a sequence's, and that running sequences have their pages."""
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
