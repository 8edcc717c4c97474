"""Allocates pages and records of the KV cache to sequences. The memory itself is native (`ops.StateCache`).

A page holds `page_size` tokens of every layer that keeps keys and values. A record holds the fixed-size state that the
other layers keep per sequence. Call `can_grow` before `grow`; nothing here raises in normal operation. `prefix.cache`
keeps the pages of finished sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from twofold.step.sequences import Sequence


class PagePool:
    """Free lists of page numbers 0 … num_pages-1 and record numbers 0 … num_records-1."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_records: int | None = None,
        draft_records: Iterable[int] = (),
    ) -> None:
        """num_records: None for a model whose layers keep none; every sequence then has record 0. draft_records:
        numbers of further records, for the state after each draft of a step."""
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self.num_records = num_records or 0
        self._free_records = None if num_records is None else list(range(num_records - 1, -1, -1))
        self._free_draft_records = list(draft_records)
        self.own_record_first = False
        """See `LoadedRunner.own_record_first`."""
        self.num_queries = 0
        """Prompt tokens looked up in the prefix cache."""
        self.num_hits = 0
        """Prefix-cache hits among num_queries, tokens."""

    @property
    def num_free(self) -> int:
        """Number of pages available to sequences."""
        return len(self._free)

    @property
    def num_free_records(self) -> int:
        return len(self._free_records or ())

    @property
    def has_record(self) -> bool:
        """Whether a record is available for one more sequence."""
        return self._free_records is None or bool(self._free_records)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.page_size)

    def can_grow(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Whether there are enough pages for all its tokens and `num_drafts` more."""
        return self.pages_for(len(sequence.token_ids) + num_drafts) - len(sequence.pages) <= self.num_free

    def grow(self, sequence: Sequence, num_drafts: int = 0) -> None:
        """Allocate pages for all its tokens and `num_drafts` more."""
        self._append(sequence.pages, len(sequence.token_ids) + num_drafts)

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether a record and pages for all tokens are available to a waiting sequence."""
        return self.has_record and self.can_grow(sequence)

    def admit(self, sequence: Sequence) -> bool:
        """Allocate both, if available. The record still holds its last owner's data; the first token resets it."""
        if not self.can_admit(sequence):
            return False
        self.grow(sequence)
        self._take_record(sequence)
        return True

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free its pages and record. keep: False if its pages' contents must not be cached."""
        self._free.extend(reversed(sequence.pages))
        sequence.pages.clear()
        if sequence.record is not None and self._free_records is not None:
            self._free_records.append(sequence.record)
        sequence.record = None

    # ---- drafts -----------------------------------------------------------------------------------------------------

    @property
    def num_draft_records(self) -> int | None:
        """Records available to drafts; None: layers keep none."""
        return None if self._free_records is None else len(self._free_draft_records)

    def take_draft_records(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Records for the state after each of `count` + 1 tokens, the sequence's own last or first; empty where layers
        keep none."""
        if self._free_records is None:
            return ()
        assert sequence.record is not None, "a running sequence without a record"
        taken = self._free_draft_records[-count:]
        del self._free_draft_records[-count:]
        return (sequence.record, *taken) if self.own_record_first else (*taken, sequence.record)

    def drop_drafts(self, sequence: Sequence, records: Seq[int], kept: int) -> None:
        """After a step with drafts, free pages beyond the sequence's tokens, and all of `records` but the one at index
        `kept`, which it has, or had when it ended."""
        num_kept = self.pages_for(len(sequence.token_ids))
        self._free.extend(reversed(sequence.pages[num_kept:]))
        del sequence.pages[num_kept:]
        self._free_draft_records += [record for at, record in enumerate(records) if at != kept]

    # ---- resizing ---------------------------------------------------------------------------------------------------

    def num_used_by(self, running: Iterable[Sequence]) -> int:
        """Pages used by these sequences, each counted once."""
        return len({page for sequence in running for page in sequence.pages})

    def trim(self, num_pages: int) -> None:
        """Evict unused cached pages, least valuable first, until at most `num_pages` pages are in use."""

    def page_moves(self, num_pages: int) -> dict[int, int]:
        """New page number of each page in use, for a pool of `num_pages` (which suffices). Pages stay in place if
        possible."""
        free = set(self._free)
        used = [page for page in range(self.num_pages) if page not in free]
        stay = {page for page in used if page < num_pages}
        others = (page for page in range(num_pages) if page not in stay)
        return {page: page if page in stay else next(others) for page in used}

    def resize(self, num_pages: int, places: Mapping[int, int], running: Iterable[Sequence]) -> None:
        """Change the pool to `num_pages`. `places`: new number of each page in use, already moved. `running`: all
        sequences with pages."""
        for sequence in running:
            sequence.pages[:] = [places[page] for page in sequence.pages]
        taken = set(places.values())
        self._free = [page for page in range(num_pages - 1, -1, -1) if page not in taken]
        self.num_pages = num_pages

    # ---- implemented only by the prefix cache -----------------------------------------------------------------------

    def estimate_hits(self, sequence: Sequence) -> None:
        """Estimate the prefix-cache hits of a new request."""

    def sync_prefix(self, sequence: Sequence) -> None:
        """Share its full pages and reuse pages that other sequences computed meanwhile; call before a prefill chunk."""

    def next_page_digest(self, sequence: Sequence) -> bytes | None:
        """Digest of the next shareable page it would compute; sequences with the same digest need not both compute
        it."""
        return None

    def prefill_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of the prompt's next tokens, at most `num_tokens`, a step should compute."""
        return num_tokens

    @property
    def num_cached(self) -> int:
        """Cached pages, including those in use by running sequences."""
        return 0

    @property
    def num_snapshots(self) -> int:
        """Number of cached record snapshots."""
        return 0

    def prefix_labels(self) -> list[bytes]:
        """Labels of finished requests' prompts that are still cached, at most 8,192."""
        return []

    def drop_cached(self, *, save: bool = False) -> int:
        """Evict all cached pages that no running sequence uses. save: first write worthwhile pages to the disk store,
        if there is one; this blocks on the disk. Returns the number of pages."""
        return 0

    def wait_for_files(self, timeout_s: float) -> bool:
        """Wait until the prefix of a waiting sequence is read from disk, at most `timeout_s`. False: nothing is being
        read."""
        return False

    def close(self, *, save: bool = True) -> None:
        """Shut the pool down; nothing is computed afterwards. save: False if the pages' memory is lost."""

    # ---- free lists -------------------------------------------------------------------------------------------------

    def _append(self, pages: list[int], num_tokens: int) -> None:
        num_new = self.pages_for(num_tokens) - len(pages)
        if num_new > 0:
            self._make_free(num_new)
            pages.extend(reversed(self._free[-num_new:]))
            del self._free[-num_new:]

    def _make_free(self, num_pages: int) -> None:
        """Make sure that the free list holds `num_pages` pages; enough are available."""

    def _take_record(self, sequence: Sequence) -> None:
        sequence.record = 0 if self._free_records is None else self._free_records.pop()
