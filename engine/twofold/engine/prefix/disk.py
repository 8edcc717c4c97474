"""Moves prefix-cache pages and snapshots between memory and disk.

Pages are written when they are evicted and at shutdown. The files that a waiting prompt can reuse are read by a
separate thread, some megabytes at a time, and copied into memory within a step, so other requests wait for neither disk
nor checksums. Where layers keep records, only pages before a snapshot are worth a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, NamedTuple

from twofold.engine.prefix.store import Kind, PrefixStore
from twofold.step.page_tree import CachedPage, PageTree
from twofold.step.state_memory import StateMemory

_BATCH_BYTES: Final = 16 * 2**20
"""Bytes read at a time and copied within one step; takes some milliseconds of it."""


class Tail(NamedTuple):
    """A partly filled page that may follow a full page."""

    digest: bytes
    end: int


class _File(NamedTuple):
    kind: Kind
    digest: bytes
    end: int
    is_tail: bool = False


class _Reading(NamedTuple):
    """A batch of files being read for one sequence."""

    owner: int
    files: list[_File]
    data: Future[list[bytes | None]]


class PrefixDisk:
    """Disk side of the prefix cache. Owned by the engine's thread."""

    def __init__(
        self,
        store: PrefixStore,
        memory: StateMemory,
        tree: PageTree,
        num_records: int | None,
        *,
        keeps_store: bool = False,
    ) -> None:
        """
        Args:
            num_records: records of sequences, numbered before the snapshots; None: layers keep no records.
            keeps_store: `close` leaves the store open.
        """
        self._keeps_store = keeps_store
        self._store, self._memory, self._tree = store, memory, tree
        self._first_snapshot = num_records
        self._page_bytes = len(memory.read_page(0))
        self._record_bytes = 0 if num_records is None else len(memory.read_record(0))
        tree.on_snapshot_lost = self.put
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="twofold-prefix-reader")
        self._reading: _Reading | None = None

    def put(self, page: CachedPage, *, wait: bool = False) -> int:
        """Write a page and its snapshot, where worthwhile and not stored yet, unless the write queue is full. Returns
        their bytes."""
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

    def load(
        self,
        owner: int,
        digests: list[bytes],
        page_size: int,
        num_in_memory: Callable[[], int],
        *,
        tails_after: Callable[[int], Iterable[Tail]],
        take_page: Callable[[], int],
    ) -> bool:
        """Read from disk what a prompt can reuse and is not in memory. False: not finished; call again.

        Args:
            owner: the sequence's number. Files are read for one sequence at a time.
            digests: of its full pages.
            num_in_memory: returns the number of its full pages that are in memory.
            tails_after: candidate tails after a number of full pages, longest first.
            take_page: returns a free page; there are enough for the prompt plus two.
        """
        reading = self._reading
        if reading is not None and (reading.owner != owner or not reading.data.done()):
            return False
        self._reading = None
        wanted = self._files_to_read(digests, num_in_memory(), page_size, tails_after)
        if reading is not None and reading.files == wanted[: len(reading.files)]:
            there = num_in_memory()
            page = self._tree.find(digests[there - 1]) if there else None
            self._copy_to_memory(reading.files, reading.data.result(), page, take_page)
            if reading.files[-1].kind == "record":  # always the last file
                return True
            # Files that could not be read are no longer in the store's index.
            wanted = self._files_to_read(digests, num_in_memory(), page_size, tails_after)
        if not wanted:
            return True
        batch = wanted[: max(1, _BATCH_BYTES // self._page_bytes)]
        self._reading = _Reading(owner, batch, self._reader.submit(self._read, batch))
        return False

    def drop(self, owner: int) -> None:
        """Stop reading for this sequence."""
        if self._reading is not None and self._reading.owner == owner:
            self._reading = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the current read, at most `timeout_s`. False: nothing is being read."""
        if self._reading is None:
            return False
        wait([self._reading.data], timeout_s)
        return True

    def close(self, *, save: bool = True) -> None:
        """Stop reading and, if `save`, save; also close a store of its own."""
        self._reader.shutdown(cancel_futures=True)
        if save:
            self.save()
        self._store.flush()
        if not self._keeps_store:
            self._store.close()

    def save(self) -> None:
        """Write everything in memory, most valuable first, up to the store's size limit."""
        left = self._store.max_bytes
        for page in self._tree.pages():
            if self._first_snapshot is not None and page.snapshot is None:
                continue
            path: list[CachedPage] = []
            unsaved: CachedPage | None = page
            while unsaved is not None and not self._store.has("page", unsaved.digest):
                path.append(unsaved)
                unsaved = unsaved.parent
            left -= self.put(page, wait=True)
            left -= sum(self.put(before, wait=True) for before in path[1:])
            if left <= 0:
                return

    def _target(
        self, digests: list[bytes], num_in_memory: int, tails_after: Callable[[int], Iterable[Tail]]
    ) -> tuple[int, Tail | None]:
        """Number of full pages, and the tail, from which a prompt can continue using what is on disk."""
        store, with_records = self._store, self._first_snapshot is not None
        most = num_in_memory
        while most < len(digests) and store.has("page", digests[most]):
            most += 1
        for target in range(most, num_in_memory - 1, -1):
            if target == 0:
                break
            for tail in tails_after(target):
                if store.has("page", tail.digest) and (not with_records or store.has("record", tail.digest)):
                    return target, None if self._tree.find(tail.digest) else tail
            if not with_records or store.has("record", digests[target - 1]):
                return target, None
        return num_in_memory, None

    def _files_to_read(
        self,
        digests: list[bytes],
        num_in_memory: int,
        page_size: int,
        tails_after: Callable[[int], Iterable[Tail]],
    ) -> list[_File]:
        """Files to read, in order: pages, a tail, and the record after them."""
        target, tail = self._target(digests, num_in_memory, tails_after)
        files = [
            _File("page", digests[number], (number + 1) * page_size)
            for number in range(num_in_memory, target)
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
        """Read files on the reader's thread, up to the first that cannot be read."""
        found: list[bytes | None] = []
        for file in files:
            num_bytes = self._page_bytes if file.kind == "page" else self._record_bytes
            found.append(self._store.get(file.kind, file.digest, num_bytes, file.end))
            if found[-1] is None:
                break
        return found

    def _copy_to_memory(
        self,
        files: list[_File],
        found: list[bytes | None],
        page: CachedPage | None,
        take_page: Callable[[], int],
    ) -> None:
        """Copy the data read into memory after `page`, up to the first file that could not be read."""
        held = [] if page is None else [page]
        for before in held:
            self._tree.use_page(before)
        for file, data in zip(files, found, strict=False):
            if data is None:
                break
            if file.kind == "record":
                assert page is not None, "a record of no page"
                self._copy_record_to_memory(page, data)
                continue
            number = take_page()
            self._memory.write_page(number, data)
            page = self._tree.add(file.digest, page, number, file.end, is_tail=file.is_tail)
            # Held so that the next page does not evict it.
            self._tree.use_page(page)
            held.append(page)
        for page in reversed(held):
            self._tree.release_page(page)

    def _copy_record_to_memory(self, page: CachedPage, data: bytes) -> None:
        snapshot = self._tree.add_snapshot(page, 0)
        if snapshot is not None and self._first_snapshot is not None:
            self._memory.write_record(self._first_snapshot + snapshot, data)
