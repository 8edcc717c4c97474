"""Finds earlier occurrences of a text's newest tokens, as LZ77 compressors do: by chains of equal n-grams.

The newest candidates are compared backwards, and the longest match wins. A suffix automaton finds the longest match
without a bound on candidates, but takes five times the memory and three times the time per token in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_CANDIDATES: Final = 16
"""Occurrences that are compared, newest first."""


class TokenMatch(NamedTuple):
    """An occurrence of a text's newest tokens."""

    end: int
    """Position after it."""
    length: int


class TokenIndex:
    """Index of a growing text's n-grams. Memory: about 200 bytes per token."""

    def __init__(self, min_match: int, max_match: int) -> None:
        """min_match: n, the shortest match. max_match: tokens compared at most; longer matches count as this long."""
        self._n = min_match
        self._max_match = max_match
        self._newest: dict[tuple[int, ...], int] = {}
        """End of each n-gram's newest occurrence."""
        self._earlier: list[int] = []
        """For the n-gram that ends at each position, the end of its previous occurrence; 0: none."""

    @property
    def num_indexed(self) -> int:
        """Leading tokens of the text that are indexed."""
        return len(self._earlier)

    def extend(self, text: Sequence[int], end: int) -> None:
        """Index `text` up to position `end`; what was indexed before must be unchanged."""
        n, newest, earlier = self._n, self._newest, self._earlier
        for last in range(len(earlier) + 1, end + 1):
            if last < n:
                earlier.append(0)
                continue
            gram = tuple(text[last - n : last])
            earlier.append(newest.get(gram, 0))
            newest[gram] = last

    def contains_end_of(self, text: Sequence[int]) -> bool:
        """Whether the shortest match with the end of `text` exists; takes a microsecond."""
        return tuple(text[-self._n :]) in self._newest

    def longest(self, text: Sequence[int], newest: Sequence[int]) -> TokenMatch | None:
        """The longest indexed occurrence in `text` of the end of `newest`; of equally long ones the newest."""
        if len(newest) < self._n:
            return None
        end = self._newest.get(tuple(newest[-self._n :]), 0)
        best: TokenMatch | None = None
        for _ in range(_CANDIDATES):
            if end == 0:
                break
            length, most = self._n, min(self._max_match, end, len(newest))
            while length < most and text[end - 1 - length] == newest[-1 - length]:
                length += 1
            if best is None or length > best.length:
                best = TokenMatch(end, length)
                if length == self._max_match:
                    break
            end = self._earlier[end - 1]
        return best


def chance_after(length: int) -> float:
    """First guess at the probability that the token after a match of `length` tokens is right."""
    return length / (length + 2)
