"""What crosses between host and device for one layer that the host places: routing and rows come, placements go.

Placements are read by a kernel from mapped memory, because a copy would queue behind uploads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from twofold.device.device import Device

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


class Parcel:
    """Small arrays for the device, packed into one piece of mapped memory and brought over by one kernel."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._native = device.native
        self._num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._host = device.staging_buffer((self._num_bytes,), torch.uint8)
        self._view = self._host.numpy()
        self._device = torch.empty(self._num_bytes, dtype=torch.uint8, device=device.torch_device)
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
        self._native.read_host(self._host.data_ptr(), self._device.data_ptr(), self._used, stream)
