"""Gated short convolution in place of attention (LFM2), with its own norm: out(c * conv(b * x)).

b, c and x are one projection of the input. The convolution is causal with a few taps per element, so the state is the
last inputs, independent of the sequence's length. Reference: transformers `models/lfm2_moe`, `Lfm2MoeShortConv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from twofold.blocks import ops
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.block import BlockPart, ComposedBlock, Cost, Record
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.blocks.device_tails import convolved
from twofold.weights.tensor_spec import HasTensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ShortConvolution(ComposedBlock):
    kind: ClassVar[str] = "attention"

    hidden_size: int
    taps: int
    eps: float
    bias: bool = False
    """Whether both projections and the convolution have biases."""

    def problems(self) -> Iterator[str]:
        if self.taps < 2:
            yield f"conv_L_cache is {self.taps}, at least 2 were expected"

    def parts(self, found: HasTensor) -> tuple[BlockPart, ...]:
        hidden = self.hidden_size
        names = LayerNames(self.layer, "conv", gguf_module="shortconv")
        project = {
            "norm": names.input_norm(hidden),
            "in": names.matrix("in_proj", "in_proj", 3 * hidden, hidden),
        }
        convolve = {"conv": names.exact("conv.weight", "conv.weight", hidden, 1, self.taps)}
        out = {"out": names.matrix("out_proj", "out_proj", hidden, hidden)}
        if self.bias:
            project["in_bias"] = names.bias("in_proj", "in_proj", 3 * hidden)
            convolve["conv_bias"] = names.bias("conv", "conv", hidden)
            out["out_bias"] = names.bias("out_proj", "out_proj", hidden)
        return BlockPart("project", project), BlockPart("convolve", convolve), BlockPart("out", out)

    @property
    def state(self) -> tuple[Record]:
        return (Record(4 * (self.taps - 1) * self.hidden_size),)

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes; the convolution's weights are float32."""
        others = sum(weights.packed_bytes(part) for part in weights.specs if part != "conv")
        return others + 4 * self.hidden_size * self.taps

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        return Cost(base.num_bytes + 2 * self.state[0].num_bytes, base.flops)

    @property
    def project(self) -> Linear:
        return Linear(("in",), "norm", self.eps)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, short convolution"
        return ops.ShortConvolution(
            pool,
            project=self.project.cpu(weights, pool, where),
            conv=np.ascontiguousarray(weights.vector("conv")[:, 0].T),
            conv_bias=weights.optional_vector("conv_bias"),
            out=Linear(("out",)).cpu(weights, pool, where),
            layer=self.layer,
            record_at=self.record_at,
        )

    @property
    def device_elements_per_token(self) -> int:
        return 5 * self.hidden_size

    def device_bytes(self, weights: BlockWeights) -> int:
        """Device bytes; biases of projections are bf16 there."""
        return super().device_bytes(weights) - 2 * 4 * self.hidden_size * self.bias

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        import torch

        project = self.project.device(weights)
        conv = torch.from_numpy(np.ascontiguousarray(weights.source.vector("conv")[:, 0].T))
        return ShortConvolutionOnDevice(
            self,
            project=project,
            conv=conv.to(project.weight.device),
            conv_bias=weights.vector("conv_bias"),
            out=Linear(("out",)).device(weights),
        )

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        """The convolution's inputs, in slots by position, with one extra record that padding writes to."""
        return (allocate((num_records + 1, self.taps, self.hidden_size), exact=True),)

    @property
    def device_record_bytes(self) -> int:
        return 4 * self.taps * self.hidden_size


@dataclass(frozen=True)
class ShortConvolutionOnDevice:
    """`ShortConvolution` on a device."""

    shape: ShortConvolution
    project: LinearOnDevice
    """Projections of b, c and x."""
    conv: Tensor
    """f32 [taps, hidden], the oldest first."""
    conv_bias: Tensor | None
    out: LinearOnDevice

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        b, c, x = self.project(hidden).float().chunk(3, -1)
        y = convolved(b * x, self.conv, state[0], step.batch)
        if self.conv_bias is not None:
            y = y + self.conv_bias
        total += self.out(c * y)
