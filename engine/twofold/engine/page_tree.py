"""Pages that hold the begin of some text, found by what they and all before them hold; and which of them goes first.

Pages that nobody runs with are kept until their room is needed. What goes then is what was used longest ago, unless
computing it again costs more: GreedyDual (Young, "On-line file caching", 1998), by which a page is worth the clock of
its last use plus what it costs, and the clock is the worth of the last that went. A page goes before the one before
it, so whatever is found is there from its begin. Snapshots of records, of which there are so many, go the same way.
Decides only: the memory is somebody else's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class CachedPage:
    """One page of some prefix. Full, or a tail: where a text has ended, and no page comes behind it."""

    digest: bytes
    """Of its tokens and all before."""
    parent: CachedPage | None
    page: int
    end: int
    """Tokens up to and with its last."""
    is_tail: bool = False
    refs: int = 0
    """Sequences that run with it; whoever runs with a page runs with all before it."""
    num_children: int = 0
    num_tails: int = 0
    """Of its children."""
    priority: float = 0.0
    is_needed: bool = False
    """On disk there is a snapshot behind it."""
    snapshot: int | None = None
    """Where the record of a sequence that had come so far is kept."""


class _Queue:
    """Pages by priority, each once; what is pushed again or dropped leaves an entry behind that no longer counts."""

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
        """The least, of these the first to have come."""
        while self._entries:
            priority, ticket, page = heapq.heappop(self._entries)
            if self._valid.get(page) == ticket:
                del self._valid[page]
                return priority, page
        return None


class PageTree:
    """All cached pages of a pool, each by its digest. One thread owns it; every call but `pages` is O(log pages)."""

    def __init__(self, cost: Callable[[int, int], float], num_snapshots: int | None = None) -> None:
        """cost: of computing the tokens from one position to another, in any unit. num_snapshots: None for a model
        whose layers keep no records; of any other a page behind its last snapshot is worth nothing."""
        self._cost = cost
        self._pages: dict[bytes, CachedPage] = {}
        self._leaves = _Queue()
        """Pages that nobody runs with and none lies behind."""
        self._clock = 0.0
        self.num_unused = 0
        """Pages that nobody runs with: all of them can be evicted, one after the other."""
        self.num_snapshots = num_snapshots
        self._free_snapshots = list(range((num_snapshots or 0) - 1, -1, -1))
        self._snapshots = _Queue()
        self._snapshot_clock = 0.0
        self.on_snapshot_lost: Callable[[CachedPage], object] = lambda page: None
        """Told of a page whose snapshot gives its place to another's."""

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_taken_snapshots(self) -> int:
        return (self.num_snapshots or 0) - len(self._free_snapshots)

    def find(self, digest: bytes) -> CachedPage | None:
        return self._pages.get(digest)

    def pages(self) -> list[CachedPage]:
        """All, a page before those behind it; of two that lie behind none the more valuable first."""
        return sorted(self._pages.values(), key=lambda page: (-page.priority, page.end))

    def add(
        self, digest: bytes, parent: CachedPage | None, page: int, end: int, *, is_tail: bool = False
    ) -> CachedPage:
        """A page that is not there yet, behind `parent`, which is; to be held or touched at once."""
        added = self._pages[digest] = CachedPage(digest, parent, page, end, is_tail)
        if parent is not None:
            parent.num_children += 1
            parent.num_tails += is_tail
            self._leaves.drop(parent)
        self.num_unused += 1
        return added

    def hold(self, page: CachedPage) -> None:
        """One more runs with it."""
        if page.refs == 0:
            self.num_unused -= 1
            self._leaves.drop(page)
        page.refs += 1

    def let_go(self, page: CachedPage) -> None:
        """One less does."""
        page.refs -= 1
        if page.refs == 0:
            self.num_unused += 1
            self.touch(page)

    def touch(self, page: CachedPage) -> None:
        """It was of use just now."""
        begin = 0 if page.parent is None else page.parent.end
        page.priority = self._clock + self._cost(begin, page.end)
        self._queue(page)

    def evict(self) -> CachedPage | None:
        """Take out the page that is worth least; None if all are run with. Its snapshot goes with it: both still hold
        what they did, until their numbers are given out again."""
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
            worthless = self.num_snapshots is not None and page.snapshot is None
            self._leaves.push(0.0 if worthless else page.priority, page)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def add_snapshot(self, page: CachedPage, begin: int) -> int | None:
        """The number of a snapshot for a page that has none, maybe another's; None where there are none at all.

        begin: where computing would begin without it.
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
        """It was of use just now, as `add_snapshot`."""
        self._snapshots.push(self._snapshot_clock + self._cost(begin, page.end), page)
