"""What a step's kernels are given to: one stream of a device, a worker that fills it, and capture of what it got."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from twofold.api.errors import KernelError

Outputs = tuple[Tensor, ...]
"""What a step leaves, at addresses that stay."""
Replay = Callable[[], None]
"""Gives a captured step to the queue once more; does not wait."""


class DeviceQueue(Protocol):
    """One stream, in order. One thread owns it."""

    @property
    def stream(self) -> int:
        """As native code takes it."""

    def active(self) -> AbstractContextManager[object]:
        """What torch and our kernels launch inside goes to this queue."""

    def capture(self, run: Callable[[], Outputs], outputs: Outputs) -> Replay:
        """`run` as something that can be replayed and then leaves its results in tensors like `outputs`, in place.

        It has run before, so that libraries have made their workspaces. Raises RuntimeError if it cannot be captured.
        """

    def start(self, launch: Callable[[], None]) -> None:
        """Let the worker give the queue what `launch` launches. If it raises, `on_error` is called there."""

    def join(self) -> None:
        """Everything started has been launched. Raises what a launch raised."""

    def wait(self) -> None:
        """Everything launched has ended. Raises RuntimeError, KernelError if it failed."""

    def wait_idle(self, limit_s: float) -> str:
        """After something was given up: everything has ended. Returns what a launch said of its failure, "" if none.

        Raises:
            KernelError: it has not ended within the limit.
        """


class LaunchWorker:
    """Runs launches, one after the other, on a thread of its own."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, "twofold-launch")
        self._on_error = on_error
        self._started: list[Future[None]] = []

    def start(self, launch: Callable[[], None]) -> None:
        """See `DeviceQueue.start`."""

        def run() -> None:
            try:
                launch()
            except BaseException:
                self._on_error()
                raise

        self._started.append(self._pool.submit(run))

    def join(self) -> None:
        """See `DeviceQueue.join`."""
        started, self._started = self._started, []
        for future in started:
            future.result()

    def wait_idle(self, limit_s: float) -> str:
        """See `DeviceQueue.wait_idle`, of what was launched."""
        started, self._started = self._started, []
        try:
            failures = [future.exception(limit_s) for future in started]
        except TimeoutError:
            raise still_busy(limit_s) from None
        return "; ".join(str(failure) for failure in failures if failure is not None)


def still_busy(limit_s: float) -> KernelError:
    """What `wait_idle` raises."""
    return KernelError(
        f"the device has not come to rest within {limit_s:g} s after a step was given up; restart the process"
    )
