"""Norm of a block's output before it is added to the residual stream (Gemma)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import ResidualBlock
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.blocks.residual_device import ResidualOnDevice
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PostNorm(ResidualBlock):
    """Norm of preceding blocks' output: those add to rows of zeros instead, and may have such norms themselves."""

    kind: ClassVar[str] = "norm"

    hidden_size: int
    eps: float
    name: str
    """Name in Hugging Face checkpoints, within the layer."""
    gguf: str
    scalar: bool = False
    """Whether the residual stream is then multiplied by the layer's scalar."""
    zero_centred: bool = False
    """Whether checkpoints store the norm minus 1."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        norm = TensorSpec(
            f"{hf}.{self.name}.weight",
            (self.hidden_size,),
            "exact",
            f"{gguf}.{self.gguf}.weight",
            zero_centred=self.zero_centred,
        )
        if not self.scalar:
            return {"norm": norm}
        scalar = TensorSpec(f"{hf}.layer_scalar", (1,), "exact", f"{gguf}.layer_output_scale.weight")
        return {"norm": norm, "scalar": scalar}

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        scale = float(weights.vector("scalar")[0]) if self.scalar else 1.0
        return ops.PostNorm(
            pool, norm_weight=weights.vector("norm"), eps=self.eps, over=self.over, scale=scale
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return PostNormOnDevice(weights.norm(), self.eps, self.over, weights.vector("scalar"))


@dataclass(frozen=True)
class PostNormOnDevice(ResidualOnDevice):
    norm: Tensor
    eps: float
    over: int
    scalar: Tensor | None
    """f32 [1]."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """Normalise `hidden`, the sum of the preceding blocks' outputs."""
        from torch.nn import functional

        total += functional.rms_norm(hidden, hidden.shape[-1:], self.norm, self.eps)
        if self.scalar is not None:
            total *= self.scalar
