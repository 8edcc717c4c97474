"""What crosses between host and device for one layer that the host places: routing and rows come, placements go.

Two answers behind one protocol. On CUDA, rows travel on a stream of their own while kernels run, and placements are
read by a kernel from mapped memory, because a copy would queue behind uploads. Where the device's memory is the host's
own, there is nothing to move.
"""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold.device.layouts import stream_of

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_ALIGNMENT: Final = 16  # of what read_host brings over


class LayerTransfers(Protocol):
    """Of one layer at a time: nothing of the layer before is used once `routing` has returned."""

    @property
    def stream(self) -> int:
        """What kernels are launched on, as native code takes it."""

    def begin(self, normed: Tensor, ids: Tensor, weights: Tensor) -> None:
        """The router has answered: bring its answer and the rows over, without waiting."""

    def routing(self) -> tuple[I32, F32]:
        """Waits for (ids [T, top_k], weights [T, top_k])."""

    def rows(self) -> F32:
        """Waits for the rows [T, hidden] in f32."""

    def mark(self) -> Any:
        """This point of the stream, for us_between."""

    def us_between(self, begin: Any, end: Any) -> float:
        """Microseconds between two marks that the stream has passed."""


class HostTransfers:
    """Device memory that is the host's own, where kernels have computed when they return."""

    stream = 0

    def begin(self, normed: Tensor, ids: Tensor, weights: Tensor) -> None:
        """See `LayerTransfers.begin`."""
        self._routing = ids.numpy(), weights.numpy()
        self._normed = normed

    def routing(self) -> tuple[I32, F32]:
        """See `LayerTransfers.routing`."""
        return self._routing

    def rows(self) -> F32:
        """See `LayerTransfers.rows`."""
        rows: F32 = self._normed.float().numpy()
        return rows

    def mark(self) -> float:
        """See `LayerTransfers.mark`."""
        return time.perf_counter()

    def us_between(self, begin: Any, end: Any) -> float:
        """See `LayerTransfers.us_between`."""
        return float(end - begin) * 1e6


class CudaTransfers:
    """Through pinned memory. All of it happens on torch's current stream, but for the rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda  # whose classes have no types
        self._side = cuda.Stream(device)
        self._routed, self._rows_here = cuda.Event(), cuda.Event()
        self._ids = self._weights = self._rows = torch.empty((0, 0))
        self._num_tokens = 0

    @property
    def stream(self) -> int:
        """See `LayerTransfers.stream`."""
        return stream_of(self._device)

    def begin(self, normed: Tensor, ids: Tensor, weights: Tensor) -> None:
        """See `LayerTransfers.begin`."""
        self._num_tokens = count = len(normed)
        if count > len(self._rows):
            self._ids = torch.empty(ids.shape, dtype=torch.int32, pin_memory=True)
            self._weights = torch.empty(weights.shape, dtype=torch.float32, pin_memory=True)
            self._rows = torch.empty(normed.shape, dtype=torch.float32, pin_memory=True)
        self._ids[:count].copy_(ids, non_blocking=True)
        self._weights[:count].copy_(weights, non_blocking=True)
        self._routed.record()
        self._side.wait_event(self._routed)
        normed.record_stream(self._side)  # whoever takes its memory next waits for the side stream
        with torch.cuda.stream(self._side):
            self._rows[:count].copy_(normed.float(), non_blocking=True)
            self._rows_here.record()

    def routing(self) -> tuple[I32, F32]:
        """See `LayerTransfers.routing`."""
        self._routed.synchronize()
        return self._ids[: self._num_tokens].numpy(), self._weights[: self._num_tokens].numpy()

    def rows(self) -> F32:
        """See `LayerTransfers.rows`."""
        self._rows_here.synchronize()
        rows: F32 = self._rows[: self._num_tokens].numpy()
        return rows

    def mark(self) -> Any:
        """See `LayerTransfers.mark`."""
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def us_between(self, begin: Any, end: Any) -> float:
        """See `LayerTransfers.us_between`."""
        return float(begin.elapsed_time(end)) * 1e3


def transfers_for(device: torch.device) -> LayerTransfers:
    """What fits the device."""
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()


class Parcel:
    """Small arrays for the device, packed into one piece of mapped memory and brought over by one kernel."""

    def __init__(self, module: Any, num_bytes: int, device: torch.device) -> None:
        """module: twofold._cuda, or what stands in for it."""
        self._module = module
        self._num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self._host = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._view = self._host.numpy()
        self._device = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    def open(self) -> None:
        """Begin anew; the device has read what was sent before."""
        self._used = 0

    def put(self, values: npt.NDArray[Any]) -> int:
        """Pack an array. Returns where the device will find it."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        begin, end = self._used, self._used + raw.size
        if end > self._num_bytes:
            raise ValueError(f"{end} bytes were packed; there is room for {self._num_bytes}")
        self._view[begin:end] = raw
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._device.data_ptr() + begin

    def send(self, stream: int) -> None:
        """What was packed is there for what the stream is given from now on."""
        self._module.read_host(self._host.data_ptr(), self._device.data_ptr(), self._used, stream)
