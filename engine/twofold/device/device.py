"""What the engine asks of a device beyond torch: `CudaDevice`, or what tests put in its place.

Whatever differs between a GPU and a device of another kind is a method here. `finding` chooses one, and it is passed
down; nobody below asks which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from twofold.blocks.device_step import DeviceKernels
from twofold.device.queue import DeviceQueue
from twofold.device.transfers import LayerTransfers

if TYPE_CHECKING:
    from twofold import _cuda


class Device(Protocol):
    """One device. Its calls go to torch's current stream unless they say otherwise."""

    @property
    def native(self) -> _cuda.Device:
        """Memory, uploads and kernels for experts; opened on the first use. KernelError if it cannot be."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors lie."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block of the decode kernels may take."""

    @property
    def most_tokens(self) -> int:
        """Of the largest layer that is worth timing on it."""

    def stream(self) -> int:
        """What torch launches on now, as native code takes it."""

    def staging_buffer(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory, from and to which copies need not wait."""

    def queue(self, on_error: Callable[[], None]) -> DeviceQueue:
        """A queue of its own. on_error: whoever waits for what its worker launches should not any longer."""

    def transfers(self) -> LayerTransfers:
        """Between host and device, for layers that the host places."""

    def kernels(self, max_length: int) -> DeviceKernels:
        """For the dense part of a model whose sequences have at most `max_length` tokens."""

    def handshake(self, hidden: int) -> str:
        """The fastest way for a step to wait for the CPU, by a probe: see `TableLayers`. ConfigError: there is none."""

    def graph(self, run: Callable[[], object]) -> Callable[[], None]:
        """`run`, which has run before, as something that can be replayed."""

    def time_us(self, run: Callable[[], object]) -> float:
        """The device's time for what `run` launches; waits for it."""

    def synchronise(self) -> None:
        """Everything launched has ended."""
