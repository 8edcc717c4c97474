"""Hyper-connections (arXiv 2409.19606): the residual stream consists of several streams of a hidden state each.

A part of a layer reads a weighted sum of the streams, and each stream gets the part's output times a weight of its own.
A token's weights are sigmoid(scale * (mix . x) / rms(x) + base), x being its streams in a row. `StreamHead` joins the
streams in the same way after the last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.blocks.residual_device import StreamHeadOnDevice, StreamsOnDevice
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StreamMix:
    """Learned weights of streams."""

    num_streams: int
    hidden_size: int
    eps: float
    """Epsilon of the root of the mean square."""
    offset: float
    """Added to the weights."""

    def tensors(self, prefix: str, gguf: str, groups: int) -> dict[str, TensorSpec]:
        """prefix, gguf: of names in Hugging Face checkpoints and in GGUF files. groups: weights of a stream."""
        rows, columns = groups * self.num_streams, self.num_streams * self.hidden_size
        shapes = {"fn": (rows, columns), "base": (rows,), "scale": (groups,)}
        roles = {"fn": "mix"}
        return {
            roles.get(name, name): TensorSpec(f"{prefix}{name}", shape, "exact", f"{gguf}_{name}.weight")
            for name, shape in shapes.items()
        }

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, where: str) -> Mapping[str, Any]:
        return {
            "mix": weights.packed(pool, where, "mix"),
            "base": weights.vector("base"),
            "scale": weights.vector("scale"),
            "num_streams": self.num_streams,
            "eps": self.eps,
            "offset": self.offset,
        }

    def device(self, weights: DeviceWeights) -> StreamMixOnDevice:
        return StreamMixOnDevice(self, *(weights.norm(part) for part in ("mix", "base", "scale")))


@dataclass(frozen=True)
class StreamMixOnDevice:
    """f32, as the checkpoint has it: the weights decide how much of every later part counts."""

    shape: StreamMix
    mix: Tensor
    base: Tensor
    scale: Tensor

    def __call__(self, streams: Tensor) -> Tensor:
        """Weights f32 [T, groups, streams] without the offset."""
        rows = streams.flatten(1)
        inverse = (rows.square().mean(1, keepdim=True) + self.shape.eps).rsqrt()
        logits = (rows @ self.mix.T * inverse).view(len(rows), -1, self.shape.num_streams)
        return (logits * self.scale[:, None] + self.base.view(-1, self.shape.num_streams)).sigmoid()

    def sums(self, streams: Tensor, weights: Tensor) -> Tensor:
        """f32 [T, hidden]: streams summed by weights [T, streams]."""
        return ((weights + self.shape.offset)[:, :, None] * streams).sum(1)


@dataclass(frozen=True)
class HyperConnection(Block):
    """Joins preceding blocks with the streams: those read a sum of the streams and add to rows of zeros."""

    kind: ClassVar[str] = "residual"

    mix: StreamMix
    name: str
    """Name in Hugging Face checkpoints, within the layer."""
    magnitude: float
    """Factor of the weights of the output."""
    over: int = 1
    """Number of preceding blocks covered."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        part = self.name.removesuffix("_hc")
        return self.mix.tensors(f"model.layers.{self.layer}.{self.name}.", f"blk.{self.layer}.hc_{part}", 2)

    @property
    def device_elements_per_token(self) -> int:
        return 2 * self.mix.num_streams * self.mix.hidden_size

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        mix = self.mix.cpu(weights, pool, f"layer {self.layer}, {self.name}")
        return ops.HyperConnection(pool, **mix, magnitude=self.magnitude, over=self.over)

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return HyperConnectionOnDevice(self.mix.device(weights), self.magnitude, self.over)


@dataclass(frozen=True)
class HyperConnectionOnDevice(StreamsOnDevice):
    mix: StreamMixOnDevice
    magnitude: float
    over: int

    @property
    def num_streams(self) -> int:
        return self.mix.shape.num_streams

    def read(self, residual: Tensor, step: DeviceStep) -> Tensor:
        weights = self.mix(residual)
        step.stream_weights = self.magnitude * weights[:, 1] + self.mix.shape.offset
        return self.mix.sums(residual, weights[:, 0])

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        assert step.stream_weights is not None, "outputs of blocks that read no streams"
        total += step.stream_weights[:, :, None] * hidden[:, None]


@dataclass(frozen=True)
class StreamHead(Block):
    """The last hidden state: a sum of the streams."""

    kind: ClassVar[str] = "residual"

    mix: StreamMix
    prefix: str
    """Prefix of its names in Hugging Face checkpoints."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        return self.mix.tensors(self.prefix, "output_hc", 1)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        return ops.StreamHead(pool, **self.mix.cpu(weights, pool, "head of the streams"))

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return _StreamHeadOnDevice(self.mix.device(weights))


@dataclass(frozen=True)
class _StreamHeadOnDevice(StreamHeadOnDevice):
    mix: StreamMixOnDevice

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        total += self.mix.sums(hidden, self.mix(hidden)[:, 0])
