"""Norm with a gate before the blocks of a part (A.X-K2): they read n * sigmoid(up . silu(down . n)), n = norm(x)."""

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
class GatedNorm(ResidualBlock):
    """Makes what preceding blocks read, and adds their output to the stream."""

    kind: ClassVar[str] = "norm"

    hidden_size: int
    eps: float
    rank: int
    name: str
    """Name in Hugging Face checkpoints, within the layer."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        """Files of GGUF have no names for these tensors."""
        prefix, hidden = f"model.layers.{self.layer}.{self.name}", self.hidden_size
        return {
            "norm": TensorSpec(f"{prefix}.norm.weight", (hidden,), "exact", ""),
            "down": TensorSpec(f"{prefix}.mlp.fc1.weight", (self.rank, hidden), "matrix", ""),
            "up": TensorSpec(f"{prefix}.mlp.fc2.weight", (hidden, self.rank), "matrix", ""),
        }

    @property
    def device_elements_per_token(self) -> int:
        return 2 * self.hidden_size + self.rank

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, {self.name}"
        return ops.GatedNorm(
            pool,
            norm_weight=weights.vector("norm"),
            eps=self.eps,
            down=weights.packed(pool, where, "down"),
            up=weights.packed(pool, where, "up"),
            over=self.over,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        down, up = (weights.matrix(part) for part in ("down", "up"))
        return GatedNormOnDevice(weights.norm(), self.eps, down=down, up=up, over=self.over)


@dataclass(frozen=True)
class GatedNormOnDevice(ResidualOnDevice):
    reads: ClassVar[bool] = True

    norm: Tensor
    """f32."""
    eps: float
    down: Tensor
    up: Tensor
    over: int

    def read(self, residual: Tensor, step: DeviceStep) -> Tensor:
        from torch.nn import functional

        rows = functional.rms_norm(residual, residual.shape[-1:], self.norm, self.eps)
        low = functional.silu(functional.linear(rows.bfloat16(), self.down).float())
        return rows * functional.linear(low.bfloat16(), self.up).float().sigmoid()

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        total += hidden
