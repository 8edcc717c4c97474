"""Experts that every token goes through: one SiLU-gated feed-forward layer on what the router before it normed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks import ops
from twofold.blocks.block import Block, BlockWeights
from twofold.weights.tensor_spec import Found, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, GatedFfn


@dataclass(frozen=True)
class SharedExperts(Block):
    hidden_size: int
    intermediate_size: int
    """Of all shared experts together: checkpoints have them as one."""
    module: str = "mlp.shared_experts"

    def tensors(self, found: Found) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}.{self.module}", f"blk.{self.layer}"
        wide, narrow = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        return {
            part: TensorSpec(f"{hf}.{part}_proj.weight", shape, "matrix", f"{gguf}.ffn_{part}_shexp.weight")
            for part, shape in (("gate", wide), ("up", wide), ("down", narrow))
        }

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        gate, up, down = (
            weights.packed(pool, f"layer {self.layer}, shared experts", part)
            for part in ("gate", "up", "down")
        )
        return ops.SharedExperts(pool, gate, up, down)

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        from twofold.blocks.device_step import GatedFfn

        return SharedExpertsOnDevice(GatedFfn.of(weights))


@dataclass(frozen=True)
class SharedExpertsOnDevice:
    ffn: GatedFfn

    def forward(self, hidden: Tensor, state: DeviceState, step: DeviceStep) -> None:
        hidden += self.ffn(step.chosen().normed)
