"""n-gram embeddings of layers (Qwen3.8-Flash-Next): a layer's rows of `ngram_tables.py`, added by gates.

Reference: transformers `models/qwen4_exp`, `Qwen4ExpTextPLELayer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from twofold.blocks import ops
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.block import Block, Cost, Record
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.blocks.device_tails import convolved
from twofold.blocks.residual_device import StreamBlockOnDevice
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NgramInput(Block):
    """Adds v + silu(convolution(norm(v))) to each residual stream; v is a projection of the layer's rows, gated."""

    kind: ClassVar[str] = "dense"

    hidden_size: int
    num_streams: int
    size: int
    """Elements of the layer's input."""
    first: int
    """Where it begins in the inputs of all layers."""
    taps: int
    dilation: int
    """Positions from one tap of the convolution to the next."""
    eps: float
    zero_centred: bool = True
    """Whether checkpoints store the norms minus 1."""

    @property
    def width(self) -> int:
        """Elements of all streams."""
        return self.num_streams * self.hidden_size

    def problems(self) -> Iterator[str]:
        if self.taps < 1:
            yield f"ple_conv_kernel_size is {self.taps}, at least 1 was expected"

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        names = LayerNames(self.layer, "ple", zero_centred=self.zero_centred)
        return {
            "key": names.matrix("key_proj", "ple_key", self.width, self.size),
            "value": names.matrix("value_proj", "ple_value", self.hidden_size, self.size),
            "key_norm": names.norm("norm_key", "ple_norm_key", self.width),
            "query_norm": names.norm("norm_query", "ple_norm_query", self.width),
            "conv_norm": names.norm("norm_conv", "ple_norm_conv", self.width),
            "conv": names.exact("conv1d.weight", "ple_conv1d.weight", self.width, 1, self.taps),
        }

    @property
    def state(self) -> tuple[Record]:
        """The convolution's last inputs; the last tokens are the sequence's own."""
        num_bytes = 4 * (self.taps - 1) * self.dilation * self.width
        return (Record(-(-num_bytes // 64) * 64),)

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes; the convolution's weights are float32."""
        others = sum(weights.packed_bytes(part) for part in weights.specs if part != "conv")
        return others + 4 * self.width * self.taps

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        base = super().cost(weights, tokens, context_len)
        return Cost(base.num_bytes + 2 * self.state[0].num_bytes, base.flops)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, n-gram embeddings"
        return ops.NgramInput(
            pool,
            key=weights.packed(pool, where, "key"),
            value=weights.packed(pool, where, "value"),
            key_norm=weights.vector("key_norm"),
            query_norm=weights.vector("query_norm"),
            conv_norm=weights.vector("conv_norm"),
            conv=np.ascontiguousarray(weights.vector("conv")[:, 0].T),
            dilation=self.dilation,
            eps=self.eps,
            first=self.first,
            layer=self.layer,
            record_at=self.record_at,
        )

    @property
    def slots(self) -> int:
        """Inputs of the convolution that a device keeps, the newest included."""
        return (self.taps - 1) * self.dilation + 1

    @property
    def device_elements_per_token(self) -> int:
        """Keys, gated values, their norms and the convolution's sums of all streams; the layer's input."""
        return 4 * self.width + self.size

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        """See `blocks.device_tails`."""
        return (allocate((num_records + 1, self.slots, self.width), exact=True),)

    @property
    def device_record_bytes(self) -> int:
        return 4 * self.slots * self.width

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        import torch

        key, shape = Linear(("key",)).device(weights), (self.num_streams, self.hidden_size)
        conv = torch.from_numpy(np.ascontiguousarray(weights.source.vector("conv")[:, 0].T))
        return NgramInputOnDevice(
            self,
            key=key,
            value=Linear(("value",)).device(weights),
            key_norm=weights.norm("key_norm").view(shape),
            query_norm=weights.norm("query_norm").view(shape),
            conv_norm=weights.norm("conv_norm").view(shape),
            conv=conv.to(key.weight.device),
        )


@dataclass(frozen=True)
class NgramInputOnDevice(StreamBlockOnDevice):
    """`NgramInput` on a device. Norms are f32 [streams, hidden], of each stream alone."""

    shape: NgramInput
    key: LinearOnDevice
    value: LinearOnDevice
    key_norm: Tensor
    query_norm: Tensor
    conv_norm: Tensor
    conv: Tensor
    """f32 [taps, streams * hidden], the oldest first."""

    @property
    def num_streams(self) -> int:
        return self.shape.num_streams

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        from torch.nn import functional

        shape, inputs = self.shape, step.batch.layer_inputs
        assert inputs is not None, "n-gram embeddings without the tables' rows"
        rows = inputs[:, shape.first : shape.first + shape.size]
        keys = self._normed(self.key(rows).float().view(hidden.shape), self.key_norm)
        products = (keys * self._normed(hidden, self.query_norm)).sum(2) / shape.hidden_size**0.5
        gates = (products.sign() * products.abs().clamp(min=1e-6).sqrt()).sigmoid()
        values = gates[:, :, None] * self.value(rows).float()[:, None]
        normed = self._normed(values, self.conv_norm).flatten(1)
        mixed = convolved(normed, self.conv, state[0], step.batch, shape.dilation)
        total += values + functional.silu(mixed).view(hidden.shape)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.rms_norm(rows, rows.shape[2:], None, self.shape.eps) * weight
