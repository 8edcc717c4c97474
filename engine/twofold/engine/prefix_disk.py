"""Between the prefix cache's memory and its files: what leaves the one is put into the other, and brought back.

Pages are put when they are evicted and at the end; what a waiting prompt can go on from is read by a thread of its own,
some megabytes at a time, which a step then takes over: others wait for neither disk nor checksums. Where layers keep
records only pages before a snapshot are worth a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, NamedTuple

from twofold.engine.page_tree import CachedPage, PageTree
from twofold.engine.prefix_store import Kind, PrefixStore
from twofold.engine.state_memory import StateMemory

_BATCH_BYTES: Final = 16 * 2**20
"""Read at a time, and copied within one step: some milliseconds of it."""


class Tail(NamedTuple):
    """What might lie behind a full page."""

    digest: bytes
    end: int


class _File(NamedTuple):
    kind: Kind
    digest: bytes
    end: int
    is_tail: bool = False


class _Reading(NamedTuple):
    """A batch of files, for one sequence."""

    owner: int
    files: list[_File]
    data: Future[list[bytes | None]]


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
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="twofold-prefix-reader")
        self._reading: _Reading | None = None

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
        owner: int,
        digests: list[bytes],
        num_there: Callable[[], int],
        page_size: int,
        tails_behind: Callable[[int], Iterable[Tail]],
        take_page: Callable[[], int],
    ) -> bool:
        """Have read what a prompt can go on from and is not in memory. False: not all of it is; ask again.

        Args:
            owner: the sequence's number. One at a time has files read.
            digests: of its full pages.
            num_there: how many of them are in memory.
            tails_behind: of so many pages, the longest first.
            take_page: a free one; there are enough for the prompt, and two.
        """
        reading = self._reading
        if reading is not None and (reading.owner != owner or not reading.data.done()):
            return False
        self._reading = None
        wanted = self._wanted(digests, num_there(), page_size, tails_behind)
        if reading is not None and reading.files == wanted[: len(reading.files)]:
            there = num_there()
            page = self._tree.find(digests[there - 1]) if there else None
            self._place(reading.files, reading.data.result(), page, take_page)
            if reading.files[-1].kind == "record":  # it comes last
                return True
            # What could not be read is known by now to be none.
            wanted = self._wanted(digests, num_there(), page_size, tails_behind)
        if not wanted:
            return True
        batch = wanted[: max(1, _BATCH_BYTES // self._page_bytes)]
        self._reading = _Reading(owner, batch, self._reader.submit(self._read, batch))
        return False

    def drop(self, owner: int) -> None:
        """The sequence wants nothing any more."""
        if self._reading is not None and self._reading.owner == owner:
            self._reading = None

    def wait(self, timeout_s: float) -> bool:
        """Until what is being read is there, or so long; False: nothing is."""
        if self._reading is None:
            return False
        wait([self._reading.data], timeout_s)
        return True

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)

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

    def _wanted(
        self,
        digests: list[bytes],
        num_there: int,
        page_size: int,
        tails_behind: Callable[[int], Iterable[Tail]],
    ) -> list[_File]:
        """The files to read, in order: pages, a tail, the record behind them."""
        target, tail = self._target(digests, num_there, tails_behind)
        files = [
            _File("page", digests[number], (number + 1) * page_size) for number in range(num_there, target)
        ]
        if tail is not None:
            files.append(_File("page", tail.digest, tail.end, is_tail=True))
        if self._first_snapshot is None or not target:
            return files
        last = digests[target - 1] if tail is None else tail.digest
        end = target * page_size if tail is None else tail.end
        page = self._tree.find(last)
        if (page is None or page.snapshot is None) and self._store.has("record", last):
            files.append(_File("record", last, end))
        return files

    def _read(self, files: list[_File]) -> list[bytes | None]:
        """On the reader's thread; up to the first that cannot be read."""
        found: list[bytes | None] = []
        for file in files:
            num_bytes = self._page_bytes if file.kind == "page" else self._record_bytes
            found.append(self._store.get(file.kind, file.digest, num_bytes, file.end))
            if found[-1] is None:
                break
        return found

    def _place(
        self,
        files: list[_File],
        found: list[bytes | None],
        page: CachedPage | None,
        take_page: Callable[[], int],
    ) -> None:
        """Copy what was read into memory, behind `page`, up to the first that could not be read."""
        held = [] if page is None else [page]
        for before in held:
            self._tree.hold(before)
        for file, data in zip(files, found, strict=False):
            if data is None:
                break
            if file.kind == "record":
                assert page is not None, "a record of no page"
                self._place_record(page, data)
                continue
            number = take_page()
            self._memory.write_page(number, data)
            page = self._tree.add(file.digest, page, number, file.end, is_tail=file.is_tail)
            # Held, so that what comes next does not take its place.
            self._tree.hold(page)
            held.append(page)
        for page in reversed(held):
            self._tree.let_go(page)

    def _place_record(self, page: CachedPage, data: bytes) -> None:
        snapshot = self._tree.add_snapshot(page, 0)
        if snapshot is not None and self._first_snapshot is not None:
            self._memory.write_record(self._first_snapshot + snapshot, data)
