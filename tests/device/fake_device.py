"""The fake device as the engine sees one: host memory, where calls have computed when they return. See `Device`.

`native` is what the module `twofold_fake` opens, with a link and a clock of its own and the project's kernels, run by
the SIMT machine; torch and a thread are the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from twofold.device.kernels import TorchKernels
from twofold.device.placed_share import DECODE_TOKENS
from twofold.device.queue import LaunchWorker, Outputs, Replay

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class FakeDevice:
    """See `Device`."""

    torch_device = torch.device("cpu")
    shared_bytes = 48 * 1024
    most_tokens = DECODE_TOKENS

    def __init__(self, native: Any = None) -> None:
        """native: a device that `twofold_fake` opened; None: nothing but dense layers is asked for."""
        self.native = native

    def stream(self) -> int:
        return 0

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def staging_buffer(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def queue(self, on_error: Callable[[], None]) -> FakeQueue:
        return FakeQueue(on_error)

    def transfers(self) -> FakeTransfers:
        return FakeTransfers()

    def kernels(self, max_length: int) -> TorchKernels:
        return TorchKernels()

    def handshake(self, hidden: int) -> str:
        return "kernels"  # there are no times worth comparing

    def graph(self, run: Callable[[], object]) -> Callable[[], None]:
        return lambda: run() and None  # type: ignore[func-returns-value]

    def time_us(self, run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e6

    def synchronise(self) -> None:
        pass


class FakeQueue:
    """Runs a device's work on a worker thread, so that the caller continues meanwhile. See `DeviceQueue`."""

    stream = 0

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._worker = LaunchWorker(on_error)
        self.start, self.join, self.wait = self._worker.start, self._worker.join, self._worker.join
        self.wait_idle = self._worker.wait_idle

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, run: Callable[[], Outputs], outputs: Outputs) -> Replay:
        """Replaying computes the step again."""

        def compute() -> None:
            for kept, made in zip(outputs, run(), strict=True):
                kept.copy_(made)

        return lambda: self._worker.start(compute)


class FakeTransfers:
    """Nothing has to move. See `LayerTransfers`."""

    stream = 0

    def begin(self, normed: Tensor, ids: Tensor, weights: Tensor) -> None:
        self._routing = ids.numpy(), weights.numpy()
        self._normed = normed

    def routing(self) -> tuple[I32, F32]:
        return self._routing

    def rows(self) -> F32:
        rows: F32 = self._normed.float().numpy()
        return rows

    def mark(self) -> float:
        return time.perf_counter()

    def us_between(self, begin: float, end: float) -> float:
        return (end - begin) * 1e6
