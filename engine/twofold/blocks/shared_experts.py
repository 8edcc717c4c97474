"""Shared experts: one gated feed-forward layer for every token, on the router's normed input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, GatedFfn
from twofold.blocks.experts import halves
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import Activation, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SharedExperts(Block):
    kind: ClassVar[str] = "shared_experts"

    hidden_size: int
    intermediate_size: int
    """Intermediate size of all shared experts together: checkpoints have them as one."""
    module: str = "mlp.shared_experts"
    gated: bool = False
    """Whether their output is multiplied by the sigmoid of one dot product with the token's row."""
    activation: Activation = "silu"
    """Activation function of the gate."""
    limit: float = 0.0
    """Bound of gate and up (kernels/include/twofold/expert.h); 0: none."""
    fused: tuple[str, str] | None = None
    """Checkpoint names of (gate and up, down), if some checkpoints fuse gate and up."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}.{self.module}", f"blk.{self.layer}"
        wide, narrow = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        if self.fused is not None:
            both, down = (f"{hf}.{name}.weight" for name in self.fused)
            joined = TensorSpec(both, (2 * self.intermediate_size, self.hidden_size), "matrix", "")
            if found(joined):
                return {"gate_up": joined, "down": TensorSpec(down, narrow, "matrix", "")}
        specs = {
            part: TensorSpec(f"{hf}.{part}_proj.weight", shape, "matrix", f"{gguf}.ffn_{part}_shexp.weight")
            for part, shape in (("gate", wide), ("up", wide), ("down", narrow))
        }
        if (
            self.fused is not None and not found(specs["gate"]) and found(specs["up"])
        ):  # one tensor in GGUF files
            both = specs["up"].gguf
            for first, part in enumerate(("gate", "up")):
                rows = (first * self.intermediate_size, 2 * self.intermediate_size)
                specs[part] = replace(specs[part], gguf=both, gguf_rows=rows)
        if self.gated:
            name, shape = f"{hf}_gate.weight", (1, self.hidden_size)
            specs["shared_gate"] = TensorSpec(name, shape, "exact", f"{gguf}.ffn_gate_inp_shexp.weight")
        return specs

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes; the token gate is a float32 vector, and gate and up are packed separately."""
        matrices = (part for part in weights.specs if part not in ("shared_gate", "gate_up"))
        num_bytes = sum(map(weights.packed_bytes, matrices)) + 4 * self.hidden_size * self.gated
        if "gate_up" in weights:
            num_bytes += 2 * packed_bytes(weights.format("gate_up"), self.intermediate_size, self.hidden_size)
        return num_bytes

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where, inner = f"layer {self.layer}, shared experts", self.intermediate_size

        def packed(half: int, part: str) -> ops.PackedMatrix:
            if "gate_up" not in weights:
                return weights.packed(pool, where, part)
            return weights.pack(
                pool,
                where,
                f"{where}: {part}",
                lambda: [halves(weights.matrix("gate_up"))[half]],
                rows=[("gate_up", range(half * inner, (half + 1) * inner))],
            )

        gate, up, down = packed(0, "gate"), packed(1, "up"), weights.packed(pool, where, "down")
        gate_of_tokens = ops.dequantise(pool, weights.checked(pool, "shared_gate"))[0] if self.gated else None
        return ops.SharedExperts(
            pool,
            gate=gate,
            up=up,
            down=down,
            shared_gate=gate_of_tokens,
            activation=self.activation,
            limit=self.limit,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return SharedExpertsOnDevice(
            GatedFfn.of(weights, self.activation, self.limit),
            weights.exact("shared_gate") if self.gated else None,
        )


@dataclass(frozen=True)
class SharedExpertsOnDevice:
    ffn: GatedFfn
    gate: Tensor | None
    """f32 [1, hidden]."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch

        rows = step.chosen().normed
        added = self.ffn(rows)
        if self.gate is not None:
            added = added * torch.sigmoid(torch.nn.functional.linear(rows.float(), self.gate))
        total += added
