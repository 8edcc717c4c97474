"""Hyper-connections (arXiv 2409.19606): the residual stream consists of several streams of a hidden state each.

A part of a layer reads one hidden state of the streams, and each stream gets the part's output times a weight of its
own. `StreamHead` reads the streams in the same way after the last layer. How they are read is a `StreamMix`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from twofold.blocks import ops
from twofold.blocks.block import Block, ResidualBlock
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.blocks.residual_device import StreamHeadOnDevice, StreamsOnDevice
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


class StreamMix(Protocol):
    """How several streams are read, and how they take an output; see `stream_mixes.py`."""

    @property
    def num_streams(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def tensors(self, hf: str, gguf: str, *, outputs: bool) -> dict[str, TensorSpec]:
        """Tensors by role; outputs: whether streams take an output.

        Args:
            hf, gguf: what their names begin with.
        """

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, where: str) -> Mapping[str, Any]:
        """Arguments of the native block."""

    def device(self, weights: DeviceWeights) -> StreamMixOnDevice: ...


class StreamMixOnDevice(Protocol):
    def read(self, streams: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What is read of streams f32 [T, streams, hidden], f32 [T, hidden]; if there are any, the streams' weights of
        the output, f32 [T, streams], and a matrix f32 [T, streams, streams] by which they are mixed before that."""


@dataclass(frozen=True)
class HyperConnection(ResidualBlock):
    """Joins preceding blocks with the streams: those read a sum of the streams and add to rows of zeros."""

    kind: ClassVar[str] = "residual"

    mix: StreamMix
    name: str
    """Name in Hugging Face checkpoints, within the layer."""
    gguf: str = ""
    """What the names in GGUF files begin with, within the layer."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}.{self.name}.", f"blk.{self.layer}.{self.gguf}"
        return self.mix.tensors(hf, gguf, outputs=True)

    @property
    def device_elements_per_token(self) -> int:
        return 2 * self.mix.num_streams * self.mix.hidden_size

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        mix = self.mix.cpu(weights, pool, f"layer {self.layer}, {self.name}")
        return ops.HyperConnection(pool, **mix, over=self.over)

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return HyperConnectionOnDevice(self.mix.device(weights), self.mix.num_streams, self.over)


@dataclass(frozen=True)
class HyperConnectionOnDevice(StreamsOnDevice):
    mix: StreamMixOnDevice
    count: int
    """Number of streams."""
    over: int

    @property
    def num_streams(self) -> int:
        return self.count

    def read(self, residual: Tensor, step: DeviceStep) -> Tensor:
        rows, step.stream_weights, step.stream_matrix = self.mix.read(residual)
        return rows

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        assert step.stream_weights is not None, "outputs of blocks that read no streams"
        if step.stream_matrix is not None:
            total.copy_(step.stream_matrix.transpose(1, 2) @ total)
        total += step.stream_weights[:, :, None] * hidden[:, None]


@dataclass(frozen=True)
class StreamHead(Block):
    """The last hidden state, read of the streams."""

    kind: ClassVar[str] = "residual"

    mix: StreamMix
    prefix: str
    """Prefix of its names in Hugging Face checkpoints, with {} for the layer."""
    gguf: str = ""
    """Prefix of its names in GGUF files."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = (each.format(self.layer) for each in (self.prefix, self.gguf))
        return self.mix.tensors(hf, gguf, outputs=False)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        return ops.StreamHead(pool, **self.mix.cpu(weights, pool, "head of the streams"))

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return _StreamHeadOnDevice(self.mix.device(weights))


@dataclass(frozen=True)
class _StreamHeadOnDevice(StreamHeadOnDevice):
    mix: StreamMixOnDevice

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        total += self.mix.read(hidden)[0]
