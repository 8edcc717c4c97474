"""Rows of a table for n-grams of tokens, by hashes: integers as in transformers `models/qwen4_exp`, bit for bit."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

_MASK: Final = 2**64 - 1
_GAMMA: Final = 0x9E3779B97F4A7C15
_SEED_OF_TABLE: Final = 10007
"""Distance of the seeds of two tables."""
_WITNESSES: Final = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Bases that decide whether a number below 2**64 is prime (Miller-Rabin)."""


@dataclass(frozen=True)
class NgramHash:
    """A table's hashes of the n-grams of 2 tokens, then of 3, and so on; each has rows of its own."""

    multipliers: tuple[int, ...]
    """Factor of each token of the longest n-gram, the newest first."""
    sizes: tuple[int, ...]
    """Rows of each hash, of equally many hashes for each length."""
    end_token: int
    """n-grams end before it, as at a sequence's begin, where it stands for the missing tokens."""

    @property
    def num_rows(self) -> int:
        """Rows of all hashes."""
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each hash."""
        return (0, *accumulate(self.sizes[:-1]))

    @functools.cached_property
    def _arrays(self) -> tuple[I64, I64, I64]:
        multipliers, sizes, offsets = (
            np.array(each, np.int64) for each in (self.multipliers, self.sizes, self.offsets)
        )
        return multipliers, sizes, offsets

    def rows(self, ids: I64) -> I64:
        """Rows [T, hashes] of tokens; ids [T, longest n-gram]: each token, then those before it, -1 for none."""
        multipliers, sizes, offsets = self._arrays
        ended = (ids < 0) | (ids == self.end_token)
        ended[:, 0] = False
        tokens = np.where(np.logical_or.accumulate(ended, axis=1), self.end_token, ids)
        mixed = np.bitwise_xor.accumulate(tokens * multipliers, axis=1)[:, 1:]
        found: I64 = np.repeat(mixed, len(sizes) // mixed.shape[1], axis=1) % sizes + offsets
        return found


def drawn_hash(
    *, table: int, ngram_size: int, heads: int, vocab_size: int, least_rows: int, seed: int, end_token: int
) -> NgramHash:
    """Hashes of the model's table number `table` as its configuration draws them.

    Args:
        heads: hashes for each length.
        least_rows: every hash has a prime number of rows, at least this one, which no other hash of any table has.
    """
    bound = max(1, (2**63 - 1) // max(vocab_size, 1) // 2)
    first = seed + _SEED_OF_TABLE * table
    mixed = (_split_mix((first + _GAMMA * (n + 1)) & _MASK) for n in range(ngram_size))
    count = (ngram_size - 1) * heads
    sizes = _primes_from(least_rows, (table + 1) * count)[table * count :]
    return NgramHash(tuple(2 * (each % bound) + 1 for each in mixed), sizes, end_token)


def ngram_ids(token_ids: npt.ArrayLike, begin: int, count: int) -> I64:
    """ids [T, count] as `NgramHash.rows` takes them, of a sequence's tokens from position `begin` on."""
    known = np.asarray(token_ids, np.int64)
    padded = np.concatenate([np.full(count - 1, -1, np.int64), known])
    found = np.lib.stride_tricks.sliding_window_view(padded, count)[begin:]
    return np.ascontiguousarray(found[:, ::-1])


def _split_mix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=8)
def _primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are not less than `least`."""
    found: list[int] = []
    value = least
    while len(found) < count:
        if _is_prime(value):
            found.append(value)
        value += 1
    return tuple(found)


def _is_prime(value: int) -> bool:
    if value < 2:
        return False
    if any(value % prime == 0 for prime in _WITNESSES):
        return value in _WITNESSES
    odd, halvings = value - 1, 0
    while odd % 2 == 0:
        odd, halvings = odd // 2, halvings + 1
    return all(_passes(value, base, odd, halvings) for base in _WITNESSES)


def _passes(value: int, base: int, odd: int, halvings: int) -> bool:
    power = pow(base, odd, value)
    if power in (1, value - 1):
        return True
    for _ in range(halvings - 1):
        power = power * power % value
        if power == value - 1:
            return True
    return False
