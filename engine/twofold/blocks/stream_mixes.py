"""Kinds of `StreamMix`: weights of whole streams (HY-4), and gates of each element (Qwen3.8-Flash-Next)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twofold.blocks import ops
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceWeights
from twofold.weights.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightedStreams:
    """A weighted sum of the streams is read.

    A token's weights are sigmoid(scale * (mix . x) / rms(x) + base) + offset, x being its streams in a row; those of
    the output have a factor before the offset.

    DeepSeek-V4 also mixes the streams with one another, by a matrix whose rows and columns have sums of about 1:
    Sinkhorn's iteration of the softmax of further rows of the mix (manifold-constrained hyper-connections).
    """

    num_streams: int
    hidden_size: int
    eps: float
    """Epsilon of the root of the mean square."""
    offset: float
    magnitude: float
    """Factor of the weights of the output."""
    output_offset: float | None = None
    """Added to the weights of the output; None: that of the others."""
    rounds: int = 0
    """Rounds of Sinkhorn's iteration of the matrix that mixes the streams; 0: they are not mixed."""

    def tensors(self, hf: str, gguf: str, *, outputs: bool) -> dict[str, TensorSpec]:
        groups, mixes = 1 + outputs, outputs and self.rounds > 0
        rows = self.num_streams * (groups + self.num_streams * mixes)
        columns = self.num_streams * self.hidden_size
        shapes = {"fn": (rows, columns), "base": (rows,), "scale": (groups + mixes,)}
        roles = {"fn": "mix"}
        return {
            roles.get(name, name): TensorSpec(f"{hf}{name}", shape, "exact", f"{gguf}{name}.weight")
            for name, shape in shapes.items()
        }

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, where: str) -> Mapping[str, Any]:
        outputs = weights.specs["scale"].shape[0] > 1
        return {
            "mix": weights.packed(pool, where, "mix"),
            "base": weights.vector("base"),
            "scale": weights.vector("scale"),
            "num_streams": self.num_streams,
            "eps": self.eps,
            "offset": self.offset,
        } | (self._of_outputs if outputs else {})

    @property
    def _of_outputs(self) -> dict[str, Any]:
        return {
            "magnitude": self.magnitude,
            "output_offset": self.output_offset,
            "rounds": self.rounds or None,
        }

    def device(self, weights: DeviceWeights) -> WeightedStreamsOnDevice:
        return WeightedStreamsOnDevice(self, *(weights.norm(part) for part in ("mix", "base", "scale")))


@dataclass(frozen=True)
class WeightedStreamsOnDevice:
    """f32, as the checkpoint has it: the weights decide how much of every later part counts."""

    shape: WeightedStreams
    mix: Tensor
    base: Tensor
    scale: Tensor

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        shape, rows, count = self.shape, streams.flatten(1), self.shape.num_streams
        inverse = (rows.square().mean(1, keepdim=True) + shape.eps).rsqrt()
        groups = [min(row // count, len(self.scale) - 1) for row in range(len(self.mix))]
        logits = rows @ self.mix.T * inverse * self.scale[groups] + self.base
        sums = ((logits[:, :count].sigmoid() + shape.offset)[:, :, None] * streams).sum(1)
        if len(self.scale) == 1:
            return sums, None, None
        offset = shape.offset if shape.output_offset is None else shape.output_offset
        outputs = shape.magnitude * logits[:, count : 2 * count].sigmoid() + offset
        if shape.rounds == 0:
            return sums, outputs, None
        matrix = logits[:, 2 * count :].view(-1, count, count).softmax(2) + shape.offset
        for number in range(shape.rounds):
            if number > 0:
                matrix = matrix / (matrix.sum(2, keepdim=True) + shape.offset)
            matrix = matrix / (matrix.sum(1, keepdim=True) + shape.offset)
        return sums, outputs, matrix


@dataclass(frozen=True)
class GatedStreams:
    """The mean of the normed streams n is read, each element times sigmoid(up . silu(down . n / number of streams)).

    The weights of the output are 2 * sigmoid(inject . n / number of streams).
    """

    num_streams: int
    hidden_size: int
    rank: int
    eps: float
    """Epsilon of the norm of each stream."""
    zero_centred: bool = True
    """Whether checkpoints store the norm minus 1."""

    def tensors(self, hf: str, gguf: str, *, outputs: bool) -> dict[str, TensorSpec]:
        wide = self.num_streams * self.hidden_size
        named = {
            "down": ("input_mix_weight_down", (self.rank, wide)),
            "up": ("input_mix_weight_up", (wide, self.rank)),
            "inject": ("block_inject_weight", (self.num_streams, wide)),
        }
        norm = TensorSpec(
            f"{hf}hc_norm.weight", (wide,), "exact", f"{gguf}norm.weight", zero_centred=self.zero_centred
        )
        return {"norm": norm} | {
            part: TensorSpec(f"{hf}{name}.weight", shape, "matrix", f"{gguf}{part}.weight")
            for part, (name, shape) in named.items()
            if outputs or part != "inject"
        }

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, where: str) -> Mapping[str, Any]:
        matrices = [part for part in ("down", "up", "inject") if part in weights]
        return {
            "norm": weights.vector("norm"),
            "eps": self.eps,
            "num_streams": self.num_streams,
            **{part: weights.packed(pool, where, part) for part in matrices},
        }

    def device(self, weights: DeviceWeights) -> GatedStreamsOnDevice:
        return GatedStreamsOnDevice(
            self,
            weights.norm("norm"),
            Linear(("down",)).device(weights),
            Linear(("up",)).device(weights),
            Linear(("inject",)).device(weights) if "inject" in weights.source else None,
        )


@dataclass(frozen=True)
class GatedStreamsOnDevice:
    shape: GatedStreams
    norm: Tensor
    """f32 [streams * hidden]."""
    down: LinearOnDevice
    up: LinearOnDevice
    inject: LinearOnDevice | None

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        from torch.nn import functional

        shape, count = self.shape, self.shape.num_streams
        normed = functional.rms_norm(streams, streams.shape[2:], None, shape.eps).flatten(1) * self.norm
        low = functional.silu(self.down(normed).float() / count)
        mean = (self.up(low).float().sigmoid() * normed).view(streams.shape).mean(1)
        if self.inject is None:
            return mean, None, None
        return mean, 2.0 * (self.inject(normed).float() / count).sigmoid(), None
