"""What a step's kernels are given to: one stream of a device, a worker that fills it, and capture of what it was given.

Two answers behind one protocol. `CudaQueue` is a CUDA stream. `HostQueue` plays one on host memory, where calls compute
and return: its worker stands for the device, so that whoever starts work goes on beside it, as beside a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
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

    def settle(self, limit_s: float) -> str:
        """After something was given up: everything has ended. Returns what a launch said of its failure, "" if none.

        Raises:
            KernelError: it has not ended within the limit.
        """


class _Worker:
    """Runs launches, one after the other, on a thread of its own."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, "twofold-launch")
        self._on_error = on_error
        self._started: list[Future[None]] = []

    def start(self, launch: Callable[[], None]) -> None:
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

    def settle(self, limit_s: float) -> str:
        started, self._started = self._started, []
        try:
            failures = [future.exception(limit_s) for future in started]
        except TimeoutError:
            raise _still_busy(limit_s) from None
        return "; ".join(str(failure) for failure in failures if failure is not None)


class CudaQueue:
    """A stream of a CUDA device. See `DeviceQueue`."""

    def __init__(self, device: torch.device, on_error: Callable[[], None]) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._worker = _Worker(on_error)
        torch.cuda.synchronize(device)  # what was made before lies on other streams
        self._pool: Any = None  # one for all graphs: only one of them runs at a time

    @property
    def stream(self) -> int:
        """See `DeviceQueue.stream`."""
        return int(self._stream.cuda_stream)

    def active(self) -> AbstractContextManager[object]:
        """See `DeviceQueue.active`."""
        return torch.cuda.stream(self._stream)

    def capture(self, run: Callable[[], Outputs], outputs: Outputs) -> Replay:
        """See `DeviceQueue.capture`."""
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads may go on allocating
        with torch.cuda.graph(graph, self._pool, self._stream, mode):
            for kept, made in zip(outputs, run(), strict=True):
                kept.copy_(made)
        self._pool = graph.pool()

        def replay() -> None:
            with self.active():
                graph.replay()

        return replay

    def start(self, launch: Callable[[], None]) -> None:
        """See `DeviceQueue.start`."""

        def run() -> None:
            with torch.cuda.device(self._device), self.active():
                launch()

        self._worker.start(run)

    def join(self) -> None:
        """See `DeviceQueue.join`."""
        self._worker.join()

    def wait(self) -> None:
        """See `DeviceQueue.wait`."""
        self._worker.join()
        self._stream.synchronize()

    def settle(self, limit_s: float) -> str:
        """See `DeviceQueue.settle`."""
        deadline = time.monotonic() + limit_s
        failure = self._worker.settle(limit_s)
        while not self._stream.query():
            if time.monotonic() > deadline:
                raise _still_busy(limit_s)
            time.sleep(1e-4)
        return failure


class HostQueue:
    """A worker thread in a device's place. See `DeviceQueue`."""

    stream = 0

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._worker = _Worker(on_error)

    def active(self) -> AbstractContextManager[object]:
        """See `DeviceQueue.active`."""
        return nullcontext()

    def capture(self, run: Callable[[], Outputs], outputs: Outputs) -> Replay:
        """See `DeviceQueue.capture`. Replaying computes the step again."""

        def compute() -> None:
            for kept, made in zip(outputs, run(), strict=True):
                kept.copy_(made)

        return lambda: self._worker.start(compute)

    def start(self, launch: Callable[[], None]) -> None:
        """See `DeviceQueue.start`."""
        self._worker.start(launch)

    def join(self) -> None:
        """See `DeviceQueue.join`."""
        self._worker.join()

    def wait(self) -> None:
        """See `DeviceQueue.wait`."""
        self._worker.join()

    def settle(self, limit_s: float) -> str:
        """See `DeviceQueue.settle`."""
        return self._worker.settle(limit_s)


def queue_for(device: torch.device, on_error: Callable[[], None]) -> DeviceQueue:
    """A queue of its own on the device. on_error: whoever waits for what the worker launches should not any longer."""
    return CudaQueue(device, on_error) if device.type == "cuda" else HostQueue(on_error)


def _still_busy(limit_s: float) -> KernelError:
    return KernelError(
        f"the device has not come to rest within {limit_s:g} s after a step was given up; restart the process"
    )
