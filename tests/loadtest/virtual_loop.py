"""An event loop whose time is scripted: it jumps to the next timer as soon as nothing moves on any socket."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

_QUIET_S = 0.003
"""Time without input or output after which nothing is in transit on a loopback connection."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(_QUIET_S)
        if not ready:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Real sockets, virtual time: a sleep of an hour ends at once, and takes an hour by `time()`."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
