"""Hyper-connections (arXiv 2409.19606): the residual stream consists of several streams of a hidden state each.

A part of a layer reads a weighted sum of the streams, and each stream gets the part's output times a weight of its own.
A token's weights are sigmoid(scale * (mix . x) / rms(x) + base), x being its streams in a row. `StreamHead` joins the
streams in the same way after the last layer.

DeepSeek-V4 also mixes the streams with one another, by a matrix whose rows and columns have sums of about 1: Sinkhorn's
iteration of the softmax of further rows of the mix (manifold-constrained hyper-connections).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block, ResidualBlock
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

    def tensors(self, prefix: str, groups: int, *, mixes: bool = False) -> dict[str, TensorSpec]:
        """groups: weights of a stream. mixes: whether weights of each stream in each other one follow. Files of GGUF
        have no names for these tensors."""
        rows = self.num_streams * (groups + self.num_streams * mixes)
        columns = self.num_streams * self.hidden_size
        shapes = {"fn": (rows, columns), "base": (rows,), "scale": (groups + mixes,)}
        roles = {"fn": "mix"}
        return {
            roles.get(name, name): TensorSpec(f"{prefix}{name}", shape, "exact", "")
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

    def logits(self, streams: Tensor) -> Tensor:
        """f32 [T, rows of the mix], of which the weights are sigmoids."""
        rows, count = streams.flatten(1), self.shape.num_streams
        inverse = (rows.square().mean(1, keepdim=True) + self.shape.eps).rsqrt()
        groups = [min(row // count, len(self.scale) - 1) for row in range(len(self.mix))]
        return rows @ self.mix.T * inverse * self.scale[groups] + self.base

    def sums(self, streams: Tensor, weights: Tensor) -> Tensor:
        """f32 [T, hidden]: streams summed by weights [T, streams]."""
        return ((weights + self.shape.offset)[:, :, None] * streams).sum(1)


@dataclass(frozen=True)
class HyperConnection(ResidualBlock):
    """Joins preceding blocks with the streams: those read a sum of the streams and add to rows of zeros."""

    kind: ClassVar[str] = "residual"

    mix: StreamMix
    name: str
    """Name in Hugging Face checkpoints, within the layer."""
    magnitude: float
    """Factor of the weights of the output."""
    output_offset: float | None = None
    """Added to the weights of the output; None: that of the others."""
    rounds: int = 0
    """Rounds of Sinkhorn's iteration of the matrix that mixes the streams; 0: they are not mixed."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        prefix = f"model.layers.{self.layer}.{self.name}."
        return self.mix.tensors(prefix, 2, mixes=self.rounds > 0)

    @property
    def offset_of_output(self) -> float:
        return self.mix.offset if self.output_offset is None else self.output_offset

    @property
    def device_elements_per_token(self) -> int:
        return 2 * self.mix.num_streams * self.mix.hidden_size

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        mix = self.mix.cpu(weights, pool, f"layer {self.layer}, {self.name}")
        return ops.HyperConnection(
            pool,
            **mix,
            magnitude=self.magnitude,
            output_offset=self.output_offset,
            rounds=self.rounds or None,
            over=self.over,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return HyperConnectionOnDevice(self, self.mix.device(weights), self.over)


@dataclass(frozen=True)
class HyperConnectionOnDevice(StreamsOnDevice):
    shape: HyperConnection
    mix: StreamMixOnDevice
    over: int

    @property
    def num_streams(self) -> int:
        return self.mix.shape.num_streams

    def read(self, residual: Tensor, step: DeviceStep) -> Tensor:
        shape, count = self.shape, self.num_streams
        logits = self.mix.logits(residual)
        weights = logits[:, : 2 * count].sigmoid()
        if shape.rounds > 0:
            matrix = _doubly_stochastic(
                logits[:, 2 * count :].view(-1, count, count), shape.rounds, shape.mix.offset
            )
            step.stream_matrix = matrix.transpose(1, 2)
        step.stream_weights = shape.magnitude * weights[:, count:] + shape.offset_of_output
        return self.mix.sums(residual, weights[:, :count])

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        assert step.stream_weights is not None, "outputs of blocks that read no streams"
        if self.shape.rounds > 0:
            assert step.stream_matrix is not None, "outputs of blocks that read no streams"
            total.copy_(step.stream_matrix @ total)
        total += step.stream_weights[:, :, None] * hidden[:, None]


def _doubly_stochastic(logits: Tensor, rounds: int, offset: float) -> Tensor:
    """f32 [T, S, S] of logits, rows and columns with sums of about 1."""
    matrix = logits.softmax(2) + offset
    for number in range(rounds):
        if number > 0:
            matrix = matrix / (matrix.sum(2, keepdim=True) + offset)
        matrix = matrix / (matrix.sum(1, keepdim=True) + offset)
    return matrix


@dataclass(frozen=True)
class StreamHead(Block):
    """The last hidden state: a sum of the streams."""

    kind: ClassVar[str] = "residual"

    mix: StreamMix
    prefix: str
    """Prefix of its names in Hugging Face checkpoints."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        return self.mix.tensors(self.prefix, 1)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        return ops.StreamHead(pool, **self.mix.cpu(weights, pool, "head of the streams"))

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return _StreamHeadOnDevice(self.mix.device(weights))


@dataclass(frozen=True)
class _StreamHeadOnDevice(StreamHeadOnDevice):
    mix: StreamMixOnDevice

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        total += self.mix.sums(hidden, self.mix.logits(hidden).sigmoid())
