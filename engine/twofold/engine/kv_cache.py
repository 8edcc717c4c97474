"""Which pages and records of the KV cache belong to whom. The memory itself is native (`ops.StateCache`).

A page holds `page_size` tokens of every layer that keeps keys and values; a record is what the other layers keep of a
sequence, however long it is. Ask (`can_grow`) before doing (`grow`); nothing here raises in normal running. What is
kept of a sequence that has ended is `prefix_cache`'s affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from twofold.engine.sequences import Sequence


class PagePool:
    """Free lists of page numbers 0 … num_pages-1 and record numbers 0 … num_records-1."""

    def __init__(self, num_pages: int, page_size: int, num_records: int | None = None) -> None:
        """num_records: None for a model whose layers keep none; then everybody's is 0."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_records = num_records or 0
        self._free_records = None if num_records is None else list(range(num_records - 1, -1, -1))
        self.num_queries = 0
        """Prompt tokens that were looked for in a cache."""
        self.num_hits = 0
        """Of these, found."""

    @property
    def num_free(self) -> int:
        """Pages that a sequence can have."""
        return len(self._free)

    @property
    def num_free_records(self) -> int:
        return len(self._free_records or ())

    @property
    def has_record(self) -> bool:
        """Whether one more sequence can have a record."""
        return self._free_records is None or bool(self._free_records)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.page_size)

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether there are pages for all its tokens."""
        return self.pages_for(len(sequence.token_ids)) - len(sequence.pages) <= self.num_free

    def grow(self, sequence: Sequence) -> None:
        """Give it pages for all its tokens."""
        self._append(sequence.pages, len(sequence.token_ids))

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits can have a record, and pages for all its tokens."""
        return self.has_record and self.can_grow(sequence)

    def admit(self, sequence: Sequence) -> bool:
        """Give it both, if there are. What is in the record is its last owner's: a first token starts it anew."""
        if not self.can_admit(sequence):
            return False
        self.grow(sequence)
        self._take_record(sequence)
        return True

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take all back; it has none afterwards. keep: False where what its pages hold is not to be trusted."""
        self._free.extend(reversed(sequence.pages))
        sequence.pages.clear()
        if sequence.record is not None and self._free_records is not None:
            self._free_records.append(sequence.record)
        sequence.record = None

    # ---- another size -----------------------------------------------------------------------------------------------

    def num_held(self, running: Iterable[Sequence]) -> int:
        """Pages that these run with, each counted once."""
        return len({page for sequence in running for page in sequence.pages})

    def trim(self, num_pages: int) -> None:
        """Forget what nobody runs with, the least worthy first, until at most so many pages are in use."""

    def places_among(self, num_pages: int) -> dict[int, int]:
        """Where each page in use would lie in a pool of so many, of which there are enough: where it is, if it can."""
        free = set(self._free)
        used = [page for page in range(self.num_pages) if page not in free]
        stay = {page for page in used if page < num_pages}
        others = (page for page in range(num_pages) if page not in stay)
        return {page: page if page in stay else next(others) for page in used}

    def resize(self, num_pages: int, places: Mapping[int, int], running: Iterable[Sequence]) -> None:
        """So many pages from now on; `places` of those in use, whose memory has moved. `running`: all who have any."""
        for sequence in running:
            sequence.pages[:] = [places[page] for page in sequence.pages]
        taken = set(places.values())
        self._free = [page for page in range(num_pages - 1, -1, -1) if page not in taken]
        self.num_pages = num_pages

    # ---- what only a cache of prefixes does -------------------------------------------------------------------------

    def look_up(self, sequence: Sequence) -> None:
        """It has come: see how much of it need not be computed."""

    def catch_up(self, sequence: Sequence) -> None:
        """Before more of its prompt is computed: share what it has, take what others have computed meanwhile."""

    def next_shared(self, sequence: Sequence) -> bytes | None:
        """What it would compute next that others could take from it; two who would compute the same need not both."""
        return None

    def chunk_of(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the prompt's next tokens, at most so many, a step is to compute."""
        return num_tokens

    @property
    def num_cached(self) -> int:
        """Pages that are kept of texts, also of those that somebody runs with."""
        return 0

    @property
    def num_snapshots(self) -> int:
        """Records that are kept beside them."""
        return 0

    def drop_cached(self, *, save: bool = False) -> int:
        """Forget all that nobody runs with. save: what is worth it goes to disk, where there is a place for it; this
        waits for the disk. Returns the number of pages."""
        return 0

    def wait_for_files(self, timeout_s: float) -> bool:
        """Until what a waiting sequence can go on from is read, or so long. False: nothing is being read."""
        return False

    def close(self) -> None:
        """Nothing more is computed."""

    # ---- free lists -------------------------------------------------------------------------------------------------

    def _append(self, pages: list[int], num_tokens: int) -> None:
        num_new = self.pages_for(num_tokens) - len(pages)
        if num_new > 0:
            self._make_free(num_new)
            pages.extend(reversed(self._free[-num_new:]))
            del self._free[-num_new:]

    def _make_free(self, num_pages: int) -> None:
        """There are so many; see to it that the free list has them."""

    def _take_record(self, sequence: Sequence) -> None:
        sequence.record = 0 if self._free_records is None else self._free_records.pop()
