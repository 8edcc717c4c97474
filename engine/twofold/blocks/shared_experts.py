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
    gated: bool = False
    """Whether what they add to a token is multiplied by the sigmoid of one product with its row."""

    def tensors(self, found: Found) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}.{self.module}", f"blk.{self.layer}"
        wide, narrow = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        specs = {
            part: TensorSpec(f"{hf}.{part}_proj.weight", shape, "matrix", f"{gguf}.ffn_{part}_shexp.weight")
            for part, shape in (("gate", wide), ("up", wide), ("down", narrow))
        }
        if self.gated:
            name, shape = f"{hf}_gate.weight", (1, self.hidden_size)
            specs["shared_gate"] = TensorSpec(name, shape, "exact", f"{gguf}.ffn_gate_inp_shexp.weight")
        return specs

    def host_bytes(self, weights: BlockWeights) -> int:
        """The gate of tokens is a vector of float32."""
        matrices = (part for part in weights.specs if part != "shared_gate")
        return sum(map(weights.packed_bytes, matrices)) + 4 * self.hidden_size * self.gated

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        gate, up, down = (
            weights.packed(pool, f"layer {self.layer}, shared experts", part)
            for part in ("gate", "up", "down")
        )
        gate_of_tokens = ops.dequantise(pool, weights.matrix("shared_gate"))[0] if self.gated else None
        return ops.SharedExperts(pool, gate, up, down, gate_of_tokens)

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        from twofold.blocks.device_step import GatedFfn

        return SharedExpertsOnDevice(
            GatedFfn.of(weights), weights.exact("shared_gate") if self.gated else None
        )


@dataclass(frozen=True)
class SharedExpertsOnDevice:
    ffn: GatedFfn
    gate: Tensor | None
    """f32 [1, hidden]."""

    def forward(self, hidden: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch

        rows = step.chosen().normed
        added = self.ffn(rows)
        if self.gate is not None:
            added = added * torch.sigmoid(torch.nn.functional.linear(rows.float(), self.gate))
        hidden += added
