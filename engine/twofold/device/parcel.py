"""Small arrays of one host-placed layer, copied to the device together."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold.device.device import Device

_ALIGNMENT: Final = 16  # alignment for read_host


class Parcel:
    """Small arrays packed into one buffer of mapped memory. A kernel copies it to the device: a copy would queue after
    uploads."""

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

    def put_tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        """Pack an array that is not empty. Returns it as a tensor on the device, valid after `send`."""
        begin = self.put(values) - self._device.data_ptr()
        return self._device[begin : begin + values.nbytes].view(torch.int64)

    def send(self, stream: int) -> None:
        """Copy the packed arrays to the device; visible to work launched on `stream` afterwards."""
        self._native.read_host(self._host, self._device, self._used, stream)
