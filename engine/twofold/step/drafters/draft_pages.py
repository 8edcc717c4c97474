"""Pages of a drafter's own KV cache, and the positions of each sequence that are in it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from twofold.step.sequences import Sequence


@dataclass(slots=True, eq=False)
class DraftPages:
    """A drafter's cache of one sequence."""

    pages: list[int] = field(default_factory=list)
    num_known: int = 0
    """Leading positions that hold the sequence's own tokens."""
    drafted: list[int] = field(default_factory=list)
    """Tokens at the positions after them: drafts."""

    def settle(self, token_ids: Seq[int]) -> None:
        """Keep the drafts that have become the sequence's tokens, but not its newest: that is computed for its
        logits."""
        end = len(token_ids) - 1
        for token in self.drafted:
            if self.num_known >= end or token_ids[self.num_known] != token:
                break
            self.num_known += 1
        self.num_known = min(self.num_known, end)
        self.drafted.clear()


class DraftPagePool:
    """Free list of page numbers. Where none is free, the sequence that drafted longest ago loses its pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: dict[int, DraftPages] = {}
        """By sequence number, the one that drafted longest ago first."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def of(self, sequence: Sequence) -> DraftPages:
        """The sequence's pages, which become the newest."""
        held = self._held.pop(sequence.number, None) or DraftPages()
        self._held[sequence.number] = held
        return held

    def grow(self, held: DraftPages, num_tokens: int, in_use: Seq[DraftPages]) -> bool:
        """Allocate pages for `num_tokens` tokens, at the cost of sequences that are not in use. False: too few."""
        missing = -(-num_tokens // self.page_size) - len(held.pages)
        if missing <= 0:
            return True
        others = (other for other in list(self._held.values()) if other is not held and other not in in_use)
        while len(self._free) < missing:
            oldest = next(others, None)
            if oldest is None:
                return False
            self._clear(oldest)
        held.pages += self._free[-missing:]
        del self._free[-missing:]
        return True

    def release(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence.number, None)
        if held is not None:
            self._clear(held)

    def _clear(self, held: DraftPages) -> None:
        self._free += held.pages
        held.pages, held.num_known, held.drafted = [], 0, []
