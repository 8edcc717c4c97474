"""Between the prefix cache's memory and its files: what leaves the one is put into the other, and brought back.

Pages are put when they are evicted and at the end; a prompt that is admitted brings what it can go on from. Where
layers keep records only pages before a snapshot are worth a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from twofold.engine.page_tree import CachedPage, PageTree
from twofold.engine.prefix_store import PrefixStore
from twofold.engine.state_memory import StateMemory


class Tail(NamedTuple):
    """What might lie behind a full page."""

    digest: bytes
    end: int


class PrefixDisk:
    """Owned by the engine's thread."""

    def __init__(
        self, store: PrefixStore, memory: StateMemory, tree: PageTree, num_records: int | None
    ) -> None:
        """num_records: of sequences, before the snapshots'; None: layers keep none."""
        self._store, self._memory, self._tree = store, memory, tree
        self._first_snapshot = num_records
        self._page_bytes = len(memory.read_page(0))
        self._record_bytes = 0 if num_records is None else len(memory.read_record(0))
        tree.on_snapshot_lost = self.put

    def put(self, page: CachedPage, *, wait: bool = False) -> int:
        """Keep a page and its snapshot, as far as they are worth it and not kept yet, unless too much waits to be
        written already. Returns their bytes."""
        with_records = self._first_snapshot is not None
        if with_records and page.snapshot is None and not page.is_needed:
            return 0
        num_bytes = 0
        if not self._store.has("page", page.digest):
            data = self._memory.read_page(page.page)
            num_bytes += len(data) * self._store.put("page", page.digest, data, page.end, wait=wait)
        if page.snapshot is not None:
            assert self._first_snapshot is not None, "a snapshot of no record"
            if not self._store.has("record", page.digest):
                data = self._memory.read_record(self._first_snapshot + page.snapshot)
                num_bytes += len(data) * self._store.put("record", page.digest, data, page.end, wait=wait)
            before = page.parent
            while before is not None and not before.is_needed:
                before.is_needed = True
                before = before.parent
        return num_bytes

    def bring(
        self,
        digests: list[bytes],
        num_there: int,
        page_size: int,
        tails_behind: Callable[[int], Iterable[Tail]],
        take_page: Callable[[], int],
    ) -> None:
        """Read what a prompt can go on from and is not in memory.

        Args:
            digests: of its full pages, of which `num_there` are in memory.
            tails_behind: of so many pages, the longest first.
            take_page: a free one; there are enough for the prompt, and two.
        """
        target, tail = self._target(digests, num_there, tails_behind)
        if target == num_there and tail is None and self._first_snapshot is None:
            return
        page = self._tree.find(digests[num_there - 1]) if num_there else None
        held = [] if page is None else [page]
        for before in held:
            self._tree.hold(before)
        for number in range(num_there, target):
            page = self._read_page(digests[number], page, (number + 1) * page_size, take_page)
            if page is None:
                break
            held.append(page)
        else:
            if tail is not None and page is not None:
                page = self._read_page(tail.digest, page, tail.end, take_page, is_tail=True)
                held += [] if page is None else [page]
            if page is not None and self._first_snapshot is not None and page.snapshot is None:
                self._read_record(page)
        for page in reversed(held):
            self._tree.let_go(page)

    def save(self, max_bytes: int) -> None:
        """Put all that is in memory, the most valuable first, up to so many bytes."""
        left = max_bytes
        for page in self._tree.pages():
            if self._first_snapshot is not None and page.snapshot is None:
                continue
            path: list[CachedPage] = []
            behind: CachedPage | None = page
            while behind is not None and not self._store.has("page", behind.digest):
                path.append(behind)
                behind = behind.parent
            left -= self.put(page, wait=True)
            left -= sum(self.put(before, wait=True) for before in path[1:])
            if left <= 0:
                return

    def _target(
        self, digests: list[bytes], num_there: int, tails_behind: Callable[[int], Iterable[Tail]]
    ) -> tuple[int, Tail | None]:
        """How many full pages, and which tail, a prompt can go on from with what is on disk."""
        store, with_records = self._store, self._first_snapshot is not None
        most = num_there
        while most < len(digests) and store.has("page", digests[most]):
            most += 1
        for target in range(most, num_there - 1, -1):
            if target == 0:
                break
            for tail in tails_behind(target):
                if store.has("page", tail.digest) and (not with_records or store.has("record", tail.digest)):
                    return target, None if self._tree.find(tail.digest) else tail
            if not with_records or store.has("record", digests[target - 1]):
                return target, None
        return num_there, None

    def _read_page(
        self,
        digest: bytes,
        parent: CachedPage | None,
        end: int,
        take_page: Callable[[], int],
        *,
        is_tail: bool = False,
    ) -> CachedPage | None:
        """Held, so that what is read next does not take its place."""
        data = self._store.get("page", digest, self._page_bytes, end)
        if data is None:
            return None
        number = take_page()
        self._memory.write_page(number, data)
        page = self._tree.add(digest, parent, number, end, is_tail=is_tail)
        self._tree.hold(page)
        return page

    def _read_record(self, page: CachedPage) -> None:
        if not self._store.has("record", page.digest):
            return
        data = self._store.get("record", page.digest, self._record_bytes, page.end)
        snapshot = None if data is None else self._tree.add_snapshot(page, 0)
        if data is not None and snapshot is not None and self._first_snapshot is not None:
            self._memory.write_record(self._first_snapshot + snapshot, data)
