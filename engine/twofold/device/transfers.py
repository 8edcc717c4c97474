"""Transfers between host and device for one host-placed layer: routing and rows to the host, placements back.

A kernel reads placements from mapped memory, because a copy would queue after uploads.
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

_ALIGNMENT: Final = 16  # alignment for read_host


class LayerTransfers(Protocol):
    """Transfers of one layer at a time: the previous layer's results are no longer used once `routing` has returned."""

    @property
    def stream(self) -> int:
        """The stream for kernels, as a native handle."""

    def begin(self, normed: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Start copying the router's result and the rows to the host, without waiting."""

    def routing(self) -> tuple[I32, F32]:
        """Wait for and return (ids [T, top_k], weights [T, top_k])."""

    def rows(self) -> F32:
        """Wait for and return the rows [T, hidden] in f32."""

    def mark(self) -> Any:
        """A mark of the current point of the stream, for us_between."""

    def us_between(self, begin: Any, end: Any) -> float:
        """Microseconds between two marks that the stream has passed."""


class Parcel:
    """Small arrays packed into one buffer of mapped memory, which one kernel copies to the device."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._native = device.native
        self._num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._host = device.staging_buffer((self._num_bytes,), torch.uint8)
        self._view = self._host.numpy()
        self._device = torch.empty(self._num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._used = 0

    def open(self) -> None:
        """Start a new parcel; the device has read the previous one."""
        self._used = 0

    def put(self, values: npt.NDArray[Any]) -> int:
        """Pack an array. Returns its address on the device."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        begin, end = self._used, self._used + raw.size
        if end > self._num_bytes:
            raise ValueError(f"{end} bytes were packed; there is room for {self._num_bytes}")
        self._view[begin:end] = raw
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._device.data_ptr() + begin

    def send(self, stream: int) -> None:
        """Copy the packed arrays to the device; visible to work launched on `stream` afterwards."""
        self._native.read_host(self._host.data_ptr(), self._device.data_ptr(), self._used, stream)
