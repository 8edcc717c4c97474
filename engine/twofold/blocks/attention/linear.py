"""A product with stacked matrices, with an optional norm of its input and an optional bias: project and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twofold.blocks import ops
from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import DeviceWeights, normed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """weight . norm(x) + bias, with the matrices `parts` stacked row-wise."""

    parts: tuple[str, ...]
    norm: str = ""
    """Role of the norm's tensor; empty, or no such tensor: the input is read as it is."""
    eps: float = 0.0
    """Epsilon of the norm."""
    doubled: bool = False
    """Whether the matrices read, after the normed input, the input as it is."""

    def bias(self, weights: BlockWeights) -> F32 | None:
        """Concatenated biases; zeros for matrices without one; None if none has one."""
        if not any(f"{part}_bias" in weights for part in self.parts):
            return None
        found = []
        for part in self.parts:
            rows = weights.specs[part].shape[0]
            name = f"{part}_bias"
            found.append(weights.vector(name) if name in weights else np.zeros(rows, np.float32))
        return np.concatenate(found)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, where: str) -> CpuPart:
        return {
            "weight": weights.packed(pool, where, *self.parts),
            "bias": self.bias(weights),
            "norm": weights.optional_vector(self.norm) if self.norm else None,
        } | ({"eps": self.eps, "doubled": self.doubled} if self.norm in weights else {})

    def device(self, weights: DeviceWeights) -> LinearOnDevice:
        import torch

        weight, bias = weights.matrix(*self.parts), self.bias(weights.source)
        return LinearOnDevice(
            weight,
            None if bias is None else torch.from_numpy(bias).to(weight.device, torch.bfloat16),
            weights.vector(self.norm) if self.norm else None,
            self.eps,
            doubled=self.doubled,
        )

    def padded_bias_rows(self, weights: BlockWeights) -> int:
        """Rows of the bias that no tensor of the checkpoint has."""
        if not any(f"{part}_bias" in weights for part in self.parts):
            return 0
        missing = (part for part in self.parts if f"{part}_bias" not in weights)
        return sum(weights.specs[part].shape[0] for part in missing)


@dataclass(frozen=True)
class LinearOnDevice:
    """`Linear` in bf16."""

    weight: Tensor
    bias: Tensor | None = None
    norm: Tensor | None = None
    """f32; None: the input is read as it is."""
    eps: float = 0.0
    doubled: bool = False

    def in_halves(self, weights: DeviceWeights, head_dim: int, others: int) -> LinearOnDevice:
        """The same with the rows of each head reordered, so that pairs 2i, 2i + 1 become halves; the last `others` rows
        are of no head. weights: those that it was made with."""
        heads, rest = np.split(np.arange(len(self.weight)), (len(self.weight) - others,))
        pairs = heads.reshape(-1, head_dim // 2, 2)
        rows = np.concatenate([pairs.swapaxes(1, 2).reshape(-1), rest])
        bias = None if self.bias is None else self.bias[rows]
        return LinearOnDevice(weights.reordered(self.weight, rows=rows), bias, self.norm, self.eps)

    def __call__(self, rows: Tensor) -> Tensor:
        import torch
        from torch.nn import functional

        read = rows.bfloat16() if self.norm is None else normed(rows, self.norm, self.eps)
        if self.doubled:
            read = torch.cat([read, rows.bfloat16()], 1)
        return functional.linear(read, self.weight, self.bias)
