"""Index of cached prefix pages by digest, with their eviction order.

Pages that no running sequence uses are kept until their room is needed. Then the least recently used page is evicted,
unless it costs more to compute again. The policy is GreedyDual (Young, "On-line file caching", 1998): a page's worth is
the clock at its last use plus its cost, and the clock is the worth of the last evicted page. A page is evicted before
its predecessor, so every cached prefix is complete from its start. Snapshots of records, limited in number, are evicted
the same way. This module only decides; it owns no memory.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class CachedPage:
    """One cached page of a prefix: full, or a tail, where a sequence ended and no page follows."""

    digest: bytes
    """Digest of its tokens and all before."""
    parent: CachedPage | None
    page: int
    end: int
    """Position after its last token."""
    is_tail: bool = False
    refs: int = 0
    """Running sequences that use it; a sequence that uses a page uses all pages before it."""
    num_children: int = 0
    num_tails: int = 0
    """Tails among its children."""
    priority: float = 0.0
    is_needed: bool = False
    """Whether a snapshot after it is on disk."""
    snapshot: int | None = None
    """Slot of the record snapshot taken at the end of this page."""


class _Queue:
    """Priority queue in which each page counts once. A page pushed again or dropped leaves a stale entry."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, CachedPage]] = []
        self._valid: dict[CachedPage, int] = {}
        self._tickets = itertools.count()

    def push(self, priority: float, page: CachedPage) -> None:
        ticket = self._valid[page] = next(self._tickets)
        if len(self._entries) > 64 + 4 * len(self._valid):
            self._entries = [entry for entry in self._entries if self._valid.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (priority, ticket, page))

    def drop(self, page: CachedPage) -> None:
        self._valid.pop(page, None)

    def pop(self) -> tuple[float, CachedPage] | None:
        """Remove and return the lowest priority; ties by insertion order."""
        while self._entries:
            priority, ticket, page = heapq.heappop(self._entries)
            if self._valid.get(page) == ticket:
                del self._valid[page]
                return priority, page
        return None


class PageTree:
    """All cached pages of a pool by digest. One thread owns it; every call but `pages` is O(log pages)."""

    def __init__(self, cost: Callable[[int, int], float], num_snapshots: int | None = None) -> None:
        """cost: cost of computing the tokens from one position to another, in any unit. num_snapshots: None for a model
        whose layers keep no records; for any other, pages after the last snapshot have no value."""
        self._cost = cost
        self._pages: dict[bytes, CachedPage] = {}
        self._leaves = _Queue()
        """Evictable pages: unused, with no page after them."""
        self._clock = 0.0
        self.num_unused = 0
        """Pages that no running sequence uses: all can be evicted, one after the other."""
        self.num_snapshots = num_snapshots
        self._free_snapshots = list(range((num_snapshots or 0) - 1, -1, -1))
        self._snapshots = _Queue()
        self._snapshot_clock = 0.0
        self.on_snapshot_lost: Callable[[CachedPage], object] = lambda page: None
        """Called with a page whose snapshot is replaced by another's."""

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_taken_snapshots(self) -> int:
        return (self.num_snapshots or 0) - len(self._free_snapshots)

    def find(self, digest: bytes) -> CachedPage | None:
        return self._pages.get(digest)

    def pages(self) -> list[CachedPage]:
        """All pages, each before the pages after it; of two without followers the more valuable first."""
        return sorted(self._pages.values(), key=lambda page: (-page.priority, page.end))

    def add(
        self, digest: bytes, parent: CachedPage | None, page: int, end: int, *, is_tail: bool = False
    ) -> CachedPage:
        """Add a page that is not cached yet after `parent`, which is. Call `use_page` or `touch` next."""
        added = self._pages[digest] = CachedPage(digest, parent, page, end, is_tail)
        if parent is not None:
            parent.num_children += 1
            parent.num_tails += is_tail
            self._leaves.drop(parent)
        self.num_unused += 1
        return added

    def use_page(self, page: CachedPage) -> None:
        """Count one more running sequence that uses the page."""
        if page.refs == 0:
            self.num_unused -= 1
            self._leaves.drop(page)
        page.refs += 1

    def release_page(self, page: CachedPage) -> None:
        """Count one running sequence less that uses the page."""
        page.refs -= 1
        if page.refs == 0:
            self.num_unused += 1
            self.touch(page)

    def touch(self, page: CachedPage) -> None:
        """Update its worth after a use."""
        begin = 0 if page.parent is None else page.parent.end
        page.priority = self._clock + self._cost(begin, page.end)
        self._queue(page)

    def evict(self) -> CachedPage | None:
        """Remove and return the least valuable page; None if all are in use. Its snapshot is removed too. Both keep
        their contents until their numbers are reused."""
        found = self._leaves.pop()
        if found is None:
            return None
        priority, page = found
        self._clock = max(self._clock, priority)
        self.num_unused -= 1
        del self._pages[page.digest]
        if page.snapshot is not None:
            self._snapshots.drop(page)
            self._free_snapshots.append(page.snapshot)
        parent = page.parent
        if parent is not None:
            parent.num_children -= 1
            parent.num_tails -= page.is_tail
            self._queue(parent)
        return page

    def _queue(self, page: CachedPage) -> None:
        if page.refs == 0 and page.num_children == 0:
            has_no_value = self.num_snapshots is not None and page.snapshot is None
            self._leaves.push(0.0 if has_no_value else page.priority, page)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def add_snapshot(self, page: CachedPage, begin: int) -> int | None:
        """Number of a snapshot for a page that has none, possibly taken from another page; None if there are none at
        all.

        begin: the position from which the tokens would be computed without it.
        """
        if not self._free_snapshots:
            found = self._snapshots.pop()
            if found is None:
                return None
            priority, least = found
            self._snapshot_clock = max(self._snapshot_clock, priority)
            self.on_snapshot_lost(least)
            assert least.snapshot is not None, "a page in the queue of snapshots without one"
            self._free_snapshots.append(least.snapshot)
            least.snapshot = None
            self._queue(least)
        page.snapshot = self._free_snapshots.pop()
        self._snapshots.push(self._snapshot_clock + self._cost(begin, page.end), page)
        self._queue(page)
        return page.snapshot

    def touch_snapshot(self, page: CachedPage, begin: int) -> None:
        """Update a snapshot's worth after a use; arguments as `add_snapshot`."""
        self._snapshots.push(self._snapshot_clock + self._cost(begin, page.end), page)
