"""Times of a drafter's passes through its model, on the run's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_NEWEST_WEIGHT: Final = 0.2
"""Weight of the newest measured time in its average."""


class PassTimes:
    """Mean times, measured or an emulated machine's."""

    def __init__(self, emulated_s: Callable[[int], float] | None = None) -> None:
        """emulated_s: time of a pass of so many tokens on an emulated machine; None: passes are measured."""
        self._emulated_s = emulated_s
        self._passes_s: dict[int, float] = {}
        """By number of sequences."""
        self._token_s = 0.0
        """A token of a long text; 0: unknown."""

    def pass_s(self, num_sequences: int) -> float:
        """A pass of few tokens of each sequence; 0: unknown."""
        if self._emulated_s is not None:
            return self._emulated_s(num_sequences)
        return self._passes_s.get(num_sequences, 0.0)

    @property
    def token_s(self) -> float:
        """A token of a long text; 0: unknown."""
        return self._token_s if self._emulated_s is None else self._emulated_s(256) / 256

    def observe(self, num_sequences: int, num_tokens: int, took_s: float, *, is_long: bool) -> float:
        """Record a measured pass. Returns its time on the run's clock. is_long: it had a long text."""
        if self._emulated_s is not None:
            return self._emulated_s(num_tokens)
        if is_long:
            before = self._token_s or took_s / num_tokens
            self._token_s = before + _NEWEST_WEIGHT * (took_s / num_tokens - before)
        else:
            before = self._passes_s.get(num_sequences, took_s)
            self._passes_s[num_sequences] = before + _NEWEST_WEIGHT * (took_s - before)
        return took_s
