"""The queue that a step's kernels are launched on: one stream, a worker thread that launches, and graph capture.

Several devices have a queue each; `JoinedQueues` is all of them, for steps that the host places.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Final, Protocol

from torch import Tensor

from twofold.api.errors import DeviceLostError

Outputs = tuple[Tensor, ...]
"""Outputs of a step, at fixed addresses."""
STUCK_S: Final = 60.0
"""Longest work of one step: a device that needs longer is taken to be stuck."""
_SPIN_S: Final = 5e-3
"""A layer's wait is shorter; a sleep would lengthen it by 50 us."""
_SLEEP_S: Final = 1e-4
Replay = Callable[[], None]
"""Enqueues a captured step again, without waiting."""


class DeviceQueue(Protocol):
    """One in-order stream, owned by one thread."""

    @property
    def stream(self) -> int:
        """The stream as a native handle."""

    def active(self) -> AbstractContextManager[object]:
        """torch's and our kernels launched inside the context go to this queue."""

    def capture(self, run: Callable[[], Outputs], outputs: Outputs) -> Replay:
        """Capture `run` for replay; each replay leaves its results in tensors like `outputs`, in place.

        `run` has run before, so that libraries have allocated their workspaces. Raises RuntimeError if capture fails.
        """

    def start(self, launch: Callable[[], None]) -> None:
        """Let the worker call `launch`. If it raises, the worker calls `on_error`."""

    def join(self) -> None:
        """Wait until all started work has been launched. Re-raises errors of launches."""

    def wait(self) -> None:
        """Wait until all launched work has finished. Raises RuntimeError, KernelError if it failed, DeviceLostError if
        it does not finish."""

    def wait_idle(self, limit_s: float) -> str:
        """After an aborted step, wait until all work has finished. Returns the error of a launch, "" if none.

        Raises:
            DeviceLostError: work is still running after the limit.
        """


class LaunchWorker:
    """Runs launches in order on a thread of its own."""

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
        started, self._started = self._started, []
        for future in started:
            future.result()

    def wait_idle(self, limit_s: float) -> str:
        """See `DeviceQueue.wait_idle`; waits for launches only."""
        started, self._started = self._started, []
        try:
            failures = [future.exception(limit_s) for future in started]
        except TimeoutError:
            raise still_busy(limit_s) from None
        return "; ".join(str(failure) for failure in failures if failure is not None)


class JoinedQueues:
    """The queues of several devices, the first device's first. See `DeviceQueue`; the first one's worker launches."""

    def __init__(self, queues: Sequence[DeviceQueue]) -> None:
        self._queues, self._first = queues, queues[0]
        self.capture, self.start, self.join = self._first.capture, self._first.start, self._first.join

    @property
    def stream(self) -> int:
        return self._first.stream

    @contextmanager
    def active(self) -> Iterator[None]:
        """See `DeviceQueue.active`: each device's kernels go to its own queue; the first device is the active one."""
        with ExitStack() as stack:
            for queue in reversed(self._queues):
                stack.enter_context(queue.active())
            yield

    def wait(self) -> None:
        for queue in self._queues:
            queue.wait()

    def wait_idle(self, limit_s: float) -> str:
        deadline = time.monotonic() + limit_s
        failures = [queue.wait_idle(max(deadline - time.monotonic(), 0.0)) for queue in self._queues]
        return "; ".join(filter(None, failures))


def joined(queues: Sequence[DeviceQueue]) -> DeviceQueue:
    """One queue of these."""
    return JoinedQueues(queues) if len(queues) > 1 else queues[0]


def wait_until(is_done: Callable[[], bool], limit_s: float = STUCK_S) -> None:
    """Wait for work of a device, asking again and again: a wait of the device's own has no limit.

    Raises:
        DeviceLostError: it has not finished within the limit.
    """
    began = time.monotonic()
    while not is_done():
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            raise DeviceLostError(f"the device has not finished its work within {limit_s:g} s")
        if waited_s > _SPIN_S:
            time.sleep(_SLEEP_S)


def still_busy(limit_s: float) -> DeviceLostError:
    """The error that `wait_idle` raises."""
    return DeviceLostError(f"the device has not come to rest within {limit_s:g} s after a step was given up")
