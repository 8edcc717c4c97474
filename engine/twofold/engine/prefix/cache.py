"""The prefix cache: pages and records of earlier computation, found by the tokens that led to them.

A page's digest covers its tokens and the previous page's digest, so equal digests mean an equal prefix. Full pages are
shared as soon as they are computed, also by running sequences. The last page of a finished sequence stays as a tail,
which other sequences copy. Where layers keep records, a prefix can be reused only at a snapshot of the record.
Snapshots are made where the server marks that a conversation may diverge, every `SNAPSHOT_INTERVAL` tokens of a prompt,
and where a sequence ends. At least a prompt's last token is computed. `page_tree` chooses which pages to evict.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from twofold.engine.kv_cache import PagePool
from twofold.engine.prefix.disk import PrefixDisk, Tail
from twofold.engine.prefix.labels import PrefixLabels
from twofold.engine.prefix.store import PrefixStore
from twofold.step.page_tree import CachedPage, PageTree
from twofold.step.sequences import Sequence
from twofold.step.state_memory import StateMemory

SNAPSHOT_INTERVAL: Final = 1024
"""Tokens of a prompt between two snapshots, or a step's tokens if these are more: no step is shortened for it."""
_MIN_TOKENS_PER_SPLIT: Final = 256
"""Tokens a snapshot must save to justify splitting a prompt there, which adds a step that reads all weights again."""
_MIN_TOKENS_PER_SNAPSHOT: Final = 16


class Match(NamedTuple):
    """The cached part of a sequence."""

    pages: list[CachedPage]
    """Full pages, in order."""
    tail: CachedPage | None
    """A partly filled page after them, which must be copied."""
    end: int
    """Number of tokens that need not be computed."""


_NOTHING: Final = Match([], None, 0)


class CachingPool(PagePool):
    """A page pool with a prefix cache: pages that no running sequence uses stay cached and count as free."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_records: int | None = None,
        draft_records: Iterable[int] = (),
        *,
        memory: StateMemory,
        cost: Callable[[int, int], float],
        num_snapshots: int = 0,
        key: bytes = b"",
        depends_on_length: bool = False,
        store: PrefixStore | None = None,
        keeps_store: bool = False,
    ) -> None:
        """
        Args:
            cost: cost of computing the tokens from one position to another, in any unit.
            num_snapshots: records numbered after the sequences', where layers keep records.
            key: everything besides tokens that decides the contents of pages.
            depends_on_length: whether page contents also depend on the prompt's length.
            store: on-disk store for evicted pages, and for all pages at shutdown.
            keeps_store: leave the store open at the end, for other engines.
        """
        super().__init__(num_pages, page_size, num_records, draft_records)
        self._memory = memory
        self._depends_on_length = depends_on_length
        self._key = key
        self._keeps_records = num_records is not None
        self._tree = PageTree(cost, None if num_records is None else num_snapshots)
        self._labels = PrefixLabels(self._tree, page_size)
        self._disk = (
            None
            if store is None
            else PrefixDisk(store, memory, self._tree, num_records, keeps_store=keeps_store)
        )

    @property
    def num_free(self) -> int:
        return len(self._free) + self._tree.num_unused

    def grow(self, sequence: Sequence, num_drafts: int = 0) -> None:
        """Allocate pages for all its tokens and `num_drafts` more; pages it has filled become shared."""
        self._publish(sequence)
        super().grow(sequence, num_drafts)

    def can_admit(self, sequence: Sequence) -> bool:
        return self._plan(sequence) is not None

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached pages, new pages for the rest, and a record, if available."""
        if self._disk is not None and not self._load_from_disk(sequence, self._disk):
            return False  # its files are still being read
        match = self._plan(sequence)
        if match is None:
            return False
        if _may_use_cache(sequence) and not sequence.was_preempted:
            self.num_queries += sequence.num_prompt_tokens
        self._take(sequence, match)
        return True

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free the sequence's pages and record; computed pages stay cached while there is room."""
        if keep and sequence.pages:
            self._publish(sequence)
            self._labels.remember(sequence)
            self._cache_end(sequence)
        num_shared = len(sequence.cached)
        for page in reversed(sequence.cached):
            self._tree.release_page(page)
        sequence.cached.clear()
        del sequence.pages[:num_shared]
        super().release(sequence)
        sequence.last_snapshot = 0
        if self._disk is not None:
            self._disk.drop(sequence.number)

    def wait_for_files(self, timeout_s: float) -> bool:
        return self._disk is not None and self._disk.wait(timeout_s)

    def estimate_hits(self, sequence: Sequence) -> None:
        sequence.num_lookup_hits = self._find(sequence).end

    def sync_prefix(self, sequence: Sequence) -> None:
        self._publish(sequence)
        if self._keeps_records and self._is_snapshot_due(sequence):
            self._snapshot(sequence, sequence.cached[-1])
        match = self._find(sequence)
        if match.end > sequence.num_computed:
            self._take(sequence, match)

    def next_page_digest(self, sequence: Sequence) -> bytes | None:
        if not _may_use_cache(sequence):
            return None
        begin = sequence.num_computed if sequence.pages else self._find(sequence).end
        if self._keeps_records:
            page = self._next_snapshot_position(sequence, begin) // self.page_size - 1
        else:
            page = begin // self.page_size
        most = (len(sequence.token_ids) - 1) // self.page_size
        return self._digests(sequence, most)[page] if 0 <= page < most else None

    def prefill_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        if not self._keeps_records:
            return num_tokens
        begin, end = sequence.num_computed, sequence.num_computed + num_tokens
        cut = self._next_snapshot_position(sequence, begin)
        if begin < cut < end:
            return cut - begin
        if end < len(sequence.token_ids):  # so that a snapshot can be made after it
            whole = end // self.page_size * self.page_size
            return whole - begin if whole > begin else num_tokens
        return num_tokens

    @property
    def num_cached(self) -> int:
        return len(self._tree)

    @property
    def num_snapshots(self) -> int:
        return self._tree.num_taken_snapshots

    def prefix_labels(self) -> list[bytes]:
        return self._labels.cached()

    def trim(self, num_pages: int) -> None:
        self._make_free(self.num_pages - num_pages)

    def resize(self, num_pages: int, places: Mapping[int, int], running: Iterable[Sequence]) -> None:
        super().resize(num_pages, places, running)
        for page in self._tree.pages():
            page.page = places[page.page]

    def drop_cached(self, *, save: bool = False) -> int:
        if save and self._disk is not None:
            self._disk.save()
        num_dropped = 0
        while (page := self._tree.evict()) is not None:
            self._free.append(page.page)
            num_dropped += 1
        return num_dropped

    def close(self, *, save: bool = True) -> None:
        if self._disk is not None:
            self._disk.close(save=save)
            self._disk = None

    # ---- lookup -----------------------------------------------------------------------------------------------------

    def _plan(self, sequence: Sequence) -> Match | None:
        """The prefix that the sequence could reuse from the cache, if there is room for it then."""
        if not self.has_record:
            return None
        num_pages = self.pages_for(len(sequence.token_ids))
        if num_pages - sequence.num_lookup_hits // self.page_size > self.num_free:
            return None  # does not fit even if all pages of the last lookup are in use by others
        match = self._find(sequence)
        sequence.num_lookup_hits = match.end
        while True:
            num_taken = sum(page.refs == 0 for page in match.pages) + (match.tail is not None)
            if num_pages - len(match.pages) <= self.num_free - num_taken:
                return match
            if match.tail is None:
                return None
            match = self._find(sequence, tails=False)

    def _find(self, sequence: Sequence, *, tails: bool = True) -> Match:
        """The longest reusable prefix without the last token, if it is longer than what the sequence has."""
        if not _may_use_cache(sequence):
            return _NOTHING
        limit = len(sequence.token_ids) - 1
        num_in_memory = self._num_in_memory(sequence)
        page = self._tree.find(sequence.digests[num_in_memory - 1]) if num_in_memory else None
        while page is not None and page.end + self.page_size > sequence.num_computed:
            tail = self._tail(sequence, page, limit) if tails and page.num_tails else None
            end = (tail or page).end
            if (tail or not self._keeps_records or page.snapshot is not None) and end > sequence.num_computed:
                return Match(_path(page), tail, end)
            page = page.parent
        return _NOTHING

    def _num_in_memory(self, sequence: Sequence) -> int:
        """Number of leading full pages before its last token that are in memory."""
        low, high = len(sequence.cached), (len(sequence.token_ids) - 1) // self.page_size
        digests = self._digests(sequence, high)
        while low < high:  # a cached page's predecessors are all cached
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._tree.find(digests[middle - 1]) else (low, middle - 1)
        return low

    def _load_from_disk(self, sequence: Sequence, disk: PrefixDisk) -> bool:
        """Read from disk what a waiting sequence can reuse, if it could be admitted. False: the read is not
        finished."""
        if not _may_use_cache(sequence) or self.pages_for(len(sequence.token_ids)) + 2 > self.num_free:
            disk.drop(sequence.number)
            return True
        limit, size = len(sequence.token_ids) - 1, self.page_size
        digests = self._digests(sequence, limit // size)

        def tails_after(num_pages: int) -> Iterator[Tail]:
            begin = num_pages * size
            for end in range(min(begin + size - 1, limit), begin, -1):
                yield Tail(_digest(digests[num_pages - 1], sequence, begin, end), end)

        def num_in_memory() -> int:
            return self._num_in_memory(sequence)

        full = digests[: limit // size]
        return disk.load(
            sequence.number, full, size, num_in_memory, tails_after=tails_after, take_page=self._take_page
        )

    def _take_page(self) -> int:
        self._make_free(1)
        return self._free.pop()

    def _tail(self, sequence: Sequence, page: CachedPage, limit: int) -> CachedPage | None:
        """The longest tail after `page` from which the sequence can continue."""
        for end in range(min(page.end + self.page_size - 1, limit), page.end, -1):
            tail = self._tree.find(_digest(page.digest, sequence, page.end, end))
            if tail is not None and (not self._keeps_records or tail.snapshot is not None):
                return tail
        return None

    def _digests(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        """Digests of at least its first `num_pages` pages."""
        digests, size = sequence.digests, self.page_size
        for page in range(len(digests), num_pages):
            before = digests[-1] if digests else self._root(sequence)
            digests.append(_digest(before, sequence, page * size, (page + 1) * size))
        return digests

    def _root(self, sequence: Sequence) -> bytes:
        request = sequence.request
        salt = request.cache_salt.encode()
        if request.adapter is not None:
            salt += b"\0" + request.adapter.digest.encode()
        length = sequence.num_prompt_tokens if self._depends_on_length else 0
        return blake2b(b"%d %d %b %b" % (len(self._key), length, self._key, salt)).digest()

    # ---- allocation and caching -------------------------------------------------------------------------------------

    def _take(self, sequence: Sequence, match: Match) -> None:
        """Give the sequence its cache hits and new pages for the rest, and free the pages that the hits replace."""
        shared = len(sequence.cached)
        new, tail = match.pages[shared:], match.tail
        for page in new:
            self._tree.use_page(page)
        if tail is not None:
            self._tree.use_page(tail)
        self._free.extend(reversed(sequence.pages[shared : len(match.pages)]))
        sequence.pages[shared : len(match.pages)] = [page.page for page in new]
        sequence.cached += new
        self._append(sequence.pages, len(sequence.token_ids))
        if tail is not None:
            self._memory.fork_page(tail.page, sequence.pages[len(sequence.cached)])
            self._tree.release_page(tail)
        if sequence.record is None:
            self._take_record(sequence)
        if match.end == 0:
            return
        if self._keeps_records:
            last = tail or match.pages[-1]
            assert last.snapshot is not None, "a match without a snapshot"
            assert sequence.record is not None, "a sequence without a record"
            self._memory.fork_record(self.num_records + last.snapshot, sequence.record)
            self._tree.touch_snapshot(last, sequence.last_snapshot)
            sequence.last_snapshot = match.end
        if not sequence.was_preempted:
            found = match.end - sequence.num_computed
            sequence.num_cached += found
            self.num_hits += found
        sequence.num_computed = match.end

    def _publish(self, sequence: Sequence) -> None:
        """Share the pages it has filled. Where an equal page is already cached, that page replaces its own."""
        num_full = sequence.num_computed // self.page_size
        cached = sequence.cached
        if len(cached) >= num_full:
            return
        digests = self._digests(sequence, num_full)
        for number in range(len(cached), num_full):
            own = sequence.pages[number]
            page = self._tree.find(digests[number])
            if page is None:
                parent = cached[-1] if cached else None
                page = self._tree.add(digests[number], parent, own, (number + 1) * self.page_size)
            elif page.page != own:
                sequence.pages[number] = page.page
                self._free.append(own)
            self._tree.use_page(page)
            cached.append(page)

    def _cache_end(self, sequence: Sequence) -> None:
        """Cache the last page of a finished sequence and, if worthwhile, a snapshot of its record."""
        end, cached = sequence.num_computed, sequence.cached
        if not cached or (self._keeps_records and end - sequence.last_snapshot < _MIN_TOKENS_PER_SNAPSHOT):
            return
        last = cached[-1]
        if end > last.end:
            digest = _digest(last.digest, sequence, last.end, end)
            tail = self._tree.find(digest)
            if tail is None:
                tail = self._tree.add(digest, last, sequence.pages.pop(len(cached)), end, is_tail=True)
            self._tree.touch(tail)
            last = tail
        if self._keeps_records:
            self._snapshot(sequence, last)

    def _snapshot(self, sequence: Sequence, page: CachedPage) -> None:
        assert sequence.record is not None, "a sequence without a record"
        assert page.end == sequence.num_computed, "a record of another position"
        if page.snapshot is None:
            number = self._tree.add_snapshot(page, sequence.last_snapshot)
            if number is None:
                return
            self._memory.fork_record(sequence.record, self.num_records + number)
        sequence.last_snapshot = page.end

    def _is_snapshot_due(self, sequence: Sequence) -> bool:
        end, cached = sequence.num_computed, sequence.cached
        if not cached or cached[-1].end != end:
            return False
        return (
            end - sequence.last_snapshot >= SNAPSHOT_INTERVAL
            or self._next_snapshot_position(sequence, end - 1) == end
        )

    def _next_snapshot_position(self, sequence: Sequence, begin: int) -> int:
        """Position after `begin` where a snapshot is worth a step of its own; 0: none."""
        size = self.page_size
        ends = sequence.request.turn_ends or (sequence.num_prompt_tokens - 1,)
        cuts = (min(end, sequence.num_prompt_tokens - 1) // size * size for end in ends)
        # A waiting sequence continues after a snapshot, or from the start.
        least = (sequence.last_snapshot if sequence.pages else begin) + _MIN_TOKENS_PER_SPLIT
        return min((cut for cut in cuts if cut > begin and cut >= least), default=0)

    def _make_free(self, num_pages: int) -> None:
        while len(self._free) < num_pages:
            page = self._tree.evict()
            assert page is not None, "fewer evictable pages than promised"
            if self._disk is not None:
                self._disk.put(page)
            self._free.append(page.page)


def _may_use_cache(sequence: Sequence) -> bool:
    """Whether the sequence may use the cache: the request asks for no result of tokens before the prompt's last."""
    request = sequence.request
    pools_earlier = request.pooling is not None and request.pooling.kind != "last"
    return request.sampling.prompt_logprobs is None and not (request.return_routed_experts or pools_earlier)


def _digest(before: bytes, sequence: Sequence, begin: int, end: int) -> bytes:
    """Digest of a sequence's tokens from `begin` up to before `end`, their pictures, and all before them."""
    media = sequence.request.media
    of_media = b"" if media is None else media.digest(begin, sequence.visible_end(end - 1))
    tokens = array("i", sequence.token_ids[begin:end])
    return blake2b(before + tokens.tobytes() + of_media, digest_size=32).digest()


def _path(page: CachedPage) -> list[CachedPage]:
    """All pages from the first to this one."""
    path = [page]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    path.reverse()
    return path
