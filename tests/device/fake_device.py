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
from torch.overrides import TorchFunctionMode
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


_HOST_READS = frozenset(
    (
        Tensor.item,
        Tensor.tolist,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.__float__,
        Tensor.nonzero,
    )
)


class NoHostReads(TorchFunctionMode):
    """Refuses operations that wait for a device to give the host values or sizes: CUDA graphs cannot capture them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = args[1] if func in (Tensor.__getitem__, Tensor.__setitem__) else ()
        parts = index if isinstance(index, tuple) else (index,)
        if func in _HOST_READS or any(
            isinstance(part, Tensor) and part.dtype == torch.bool for part in parts
        ):
            raise AssertionError(
                f"{func.__name__} reads a device's tensor on the host within a captured step"
            )
        return func(*args, **(kwargs or {}))


class FakeQueue:
    """Runs a device's work on a worker thread, so that the caller continues meanwhile. See `DeviceQueue`."""

    stream = 0
    captures: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of captured steps."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._worker = LaunchWorker(on_error)
        self.start, self.join, self.wait = self._worker.start, self._worker.join, self._worker.join
        self.wait_idle = self._worker.wait_idle

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, run: Callable[[], Outputs], outputs: Outputs) -> Replay:
        """Replaying computes the step again."""

        def compute() -> None:
            with self.captures():
                made = run()
            for kept, new in zip(outputs, made, strict=True):
                kept.copy_(new)

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
