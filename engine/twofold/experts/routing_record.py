"""What executors count of their routing, over executors that come and go; and a recording of it as files.

The counts are native and of whole steps only; this module knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold import _core

I64 = npt.NDArray[np.int64]

PLACEMENTS: Final = tuple(
    sorted(_core.Placement.__members__, key=lambda name: int(_core.Placement.__members__[name]))
)
HIT: Final = PLACEMENTS.index("HIT")
CPU: Final = PLACEMENTS.index("CPU")


class RoutingRecord:
    """Belongs to a `MoeRuntime`; its thread owns it. Counts survive another number of slots."""

    def __init__(self, counts: Callable[[], _core.RoutingCounts]) -> None:
        """`counts`: of the executor of the moment, which nothing here keeps alive."""
        self._native = counts
        self._asked = (_core.RoutingDetail.OFF, 1)
        self._left: tuple[I64, int, int] | None = None

    def start(self, *, tokens: bool = False, every: int = 1) -> None:
        """Count anew from the next step on, in every n-th step; with `tokens` each token's experts are kept, too."""
        detail = _core.RoutingDetail.TOKENS if tokens else _core.RoutingDetail.COUNTS
        self._begin(detail, every)

    def stop(self) -> None:
        """Counts go, and counting costs nothing from here on."""
        self._begin(_core.RoutingDetail.OFF, 1)

    def _begin(self, detail: _core.RoutingDetail, every: int) -> None:
        self._asked, self._left = (detail, every), None
        self._native().start(detail, every)

    def leave(self) -> None:
        """Before the executor is replaced."""
        if self._asked[0] != _core.RoutingDetail.OFF:
            self._left = self.take()

    def join(self) -> None:
        """After it was."""
        if self._asked[0] != _core.RoutingDetail.OFF:
            self._native().start(*self._asked)

    def take(self) -> tuple[I64, int, int]:
        """(times routed to [placements, layers, experts], steps, tokens) since the last call."""
        native = self._native()
        steps, tokens = native.num_steps, native.num_tokens
        counts = native.take()
        if self._left is not None:
            left, self._left = self._left, None
            return counts + left[0], steps + left[1], tokens + left[2]
        return counts, steps, tokens

    def take_step(self) -> dict[str, Any] | None:
        """Of the last step, where tokens are kept: `requests` and `positions` [tokens], `experts` and `placement`
        [layers, tokens, top_k]; once."""
        return self._native().take_step()
