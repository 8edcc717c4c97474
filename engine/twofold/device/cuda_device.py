"""The CUDA implementation of `Device`: streams, graphs, pinned memory and events, through torch."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold.api.errors import ConfigError, DeviceLostError
from twofold.device.backend import NativeDevice, load_backend
from twofold.device.calibration import PREFILL_TOKENS
from twofold.device.native_kernels import NativeDenseKernels
from twofold.device.queue import LaunchWorker, Outputs, Replay, still_busy, wait_until

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_SHARED_BYTES_OF_ALL: Final = 48 * 1024
_log = logging.getLogger(__name__)


class CudaDevice:
    """See `Device`."""

    most_tokens = PREFILL_TOKENS[-1]

    def __init__(self, index: int = 0) -> None:
        """index: the device's number, as CUDA counts them."""
        self.torch_device = torch.device("cuda", index)
        self._index = index

    @functools.cached_property
    def native(self) -> NativeDevice:
        backend, missing = load_backend("cuda")
        assert backend is not None, missing
        return backend.open_device(self._index)

    @property
    def shared_bytes(self) -> int:
        properties = torch.cuda.get_device_properties(self.torch_device)
        return int(getattr(properties, "shared_memory_per_block_optin", _SHARED_BYTES_OF_ALL))

    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.torch_device)

    def staging_buffer(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Device`. Pinned."""
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def queue(self, on_error: Callable[[], None]) -> CudaQueue:
        return CudaQueue(self.torch_device, on_error)

    def transfers(self) -> CudaTransfers:
        return CudaTransfers(self)

    def kernels(self, max_length: int) -> NativeDenseKernels:
        return NativeDenseKernels(self, max_length)

    def handshake(self, hidden: int) -> str:
        probed = self.native.probe_handshakes(hidden)
        _log.info("handshake: %s", probed["reason"])
        if not probed["kind"]:
            raise ConfigError(f"the device cannot hand layers over to the CPU ({probed['reason']})")
        return probed["kind"]

    def graph(self, run: Callable[[], object]) -> Callable[[], None]:
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

        def replay(owner: object = run) -> None:  # keeps alive what the graph reads
            graph.replay()

        return replay

    def time_us(self, run: Callable[[], object]) -> float:
        event: Any = torch.cuda.Event  # torch.cuda's classes have no types
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class CudaQueue:
    """A stream of a CUDA device. See `DeviceQueue`."""

    def __init__(self, device: torch.device, on_error: Callable[[], None]) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._worker = LaunchWorker(on_error)
        torch.cuda.synchronize(device)  # earlier work is on other streams
        self._pool: Any = None  # memory pool of all graphs: only one of them runs at a time

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def capture(self, run: Callable[[], Outputs], outputs: Outputs) -> Replay:
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads may keep allocating
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
        self._worker.join()

    def wait(self) -> None:
        self._worker.join()
        wait_until(self._stream.query)

    def wait_idle(self, limit_s: float) -> str:
        deadline = time.monotonic() + limit_s
        failure = self._worker.wait_idle(limit_s)
        try:
            wait_until(self._stream.query, deadline - time.monotonic())
        except DeviceLostError:
            raise still_busy(limit_s) from None
        return failure


class CudaTransfers:
    """See `LayerTransfers`. Rows are copied on a separate stream while kernels run; the rest on torch's current one."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        cuda: Any = torch.cuda  # torch.cuda's classes have no types
        self._side = cuda.Stream(device.torch_device)
        self._routed, self._rows_here = cuda.Event(), cuda.Event()
        self._ids = self._weights = self._rows = torch.empty((0, 0))
        self._num_tokens = 0

    @property
    def stream(self) -> int:
        return self._device.stream()

    def begin(self, normed: Tensor, ids: Tensor, weights: Tensor) -> None:
        self._num_tokens = count = len(normed)
        if count > len(self._rows):
            self._ids = torch.empty(ids.shape, dtype=torch.int32, pin_memory=True)
            self._weights = torch.empty(weights.shape, dtype=torch.float32, pin_memory=True)
            self._rows = torch.empty(normed.shape, dtype=torch.float32, pin_memory=True)
        self._ids[:count].copy_(ids, non_blocking=True)
        self._weights[:count].copy_(weights, non_blocking=True)
        self._routed.record()
        self._side.wait_event(self._routed)
        normed.record_stream(self._side)  # the allocator reuses this memory only after the side stream
        with torch.cuda.stream(self._side):
            self._rows[:count].copy_(normed.float(), non_blocking=True)
            self._rows_here.record()

    def routing(self) -> tuple[I32, F32]:
        wait_until(self._routed.query)
        return self._ids[: self._num_tokens].numpy(), self._weights[: self._num_tokens].numpy()

    def rows(self) -> F32:
        wait_until(self._rows_here.query)
        rows: F32 = self._rows[: self._num_tokens].numpy()
        return rows

    def mark(self) -> Any:
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def us_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e3
