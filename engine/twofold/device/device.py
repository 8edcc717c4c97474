"""The device interface beyond torch: implemented by `CudaDevice` and by the tests' fake device.

Every difference between a GPU and another kind of device is a method here. `finding` chooses the device and passes it
down; no other module checks its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twofold.blocks.device_step import DeviceKernels
from twofold.device.backend import NativeDevice
from twofold.device.queue import DeviceQueue

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


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


class Device(Protocol):
    """One device. Calls run on torch's current stream unless stated otherwise."""

    @property
    def native(self) -> NativeDevice:
        """Memory, uploads and expert kernels; opened on first use. KernelError if it cannot be opened."""

    @property
    def torch_device(self) -> torch.device:
        """The torch device of its tensors."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory available to a block of the decode kernels, bytes."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest layer worth timing on this device."""

    def stream(self) -> int:
        """torch's current stream of this device, as a native handle."""

    def active(self) -> AbstractContextManager[object]:
        """Kernels launched inside the context are for this device, which its streams alone do not say."""

    def staging_buffer(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed host memory for asynchronous copies in both directions."""

    def queue(self, on_error: Callable[[], None]) -> DeviceQueue:
        """A new queue. on_error: called when a worker's launch fails, so that threads waiting for its result stop."""

    def transfers(self) -> LayerTransfers:
        """Host-device transfers, for layers that the host places."""

    def kernels(self, max_length: int) -> DeviceKernels:
        """Kernels for the dense part of a model with sequences of at most `max_length` tokens."""

    def handshake(self, hidden: int) -> str:
        """The fastest way for a step to wait for the CPU, by a probe (see `TableLayers`). ConfigError: none works."""

    def graph(self, run: Callable[[], object]) -> Callable[[], None]:
        """Capture `run`, which has run before, for replay."""

    def time_us(self, run: Callable[[], object]) -> float:
        """Device time of what `run` launches; waits for it."""

    def synchronise(self) -> None:
        """Wait until everything launched has finished."""
