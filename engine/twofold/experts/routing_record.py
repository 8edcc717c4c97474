"""Routing counts that persist when executors are replaced, for recordings.

The counts are native and of whole steps only; this module knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold import _core

I64 = npt.NDArray[np.int64]

PLACEMENTS: Final = tuple(_core.Placement.__members__)
HIT: Final = _core.Placement.HIT
CPU: Final = _core.Placement.CPU


class RoutingRecord:
    """Routing counts of a `MoeRuntime`, whose thread owns it. They persist when the number of slots changes."""

    def __init__(self, counts: Callable[[], _core.RoutingCounts]) -> None:
        """`counts` returns those of the current executor; no reference to it is kept here."""
        self._native = counts
        self._settings = (_core.RoutingDetail.OFF, 1)
        self._saved: tuple[I64, int, int] | None = None

    def start(self, *, tokens: bool = False, every: int = 1) -> None:
        """Restart counting with the next step, in every n-th step; with `tokens` each token's experts are kept, too."""
        detail = _core.RoutingDetail.TOKENS if tokens else _core.RoutingDetail.COUNTS
        self._begin(detail, every)

    def stop(self) -> None:
        """Discard the counts and stop counting, which then has no cost."""
        self._begin(_core.RoutingDetail.OFF, 1)

    def _begin(self, detail: _core.RoutingDetail, every: int) -> None:
        self._settings, self._saved = (detail, every), None
        self._native().start(detail, every)

    def save(self) -> None:
        """Save the counts before the executor is replaced."""
        if self._settings[0] != _core.RoutingDetail.OFF:
            self._saved = self.take()

    def resume(self) -> None:
        """Resume counting on the new executor."""
        if self._settings[0] != _core.RoutingDetail.OFF:
            self._native().start(*self._settings)

    def take(self) -> tuple[I64, int, int]:
        """(times routed to [placements, layers, experts], steps, tokens) since the last call."""
        native = self._native()
        steps, tokens = native.num_steps, native.num_tokens
        counts = native.take()
        if self._saved is not None:
            saved, self._saved = self._saved, None
            return counts + saved[0], steps + saved[1], tokens + saved[2]
        return counts, steps, tokens

    def take_step(self) -> dict[str, Any] | None:
        """Routing of the last step, once, if tokens are kept: `requests` and `positions` [tokens], `experts` and
        `placement` [layers, tokens, top_k]."""
        return self._native().take_step()
