"""Shared experts: one gated feed-forward layer for every token, on the router's normed input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, GatedFfn
from twofold.blocks.gated_matrices import GatedMatrices
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import Activation

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

    @property
    def matrices(self) -> GatedMatrices:
        return GatedMatrices(
            self.layer,
            self.module,
            hidden=self.hidden_size,
            inner=self.intermediate_size,
            gguf_suffix="_shexp",
            fused=self.fused,
        )

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        specs = self.matrices.tensors(found)
        if self.gated:
            hf, gguf = f"model.layers.{self.layer}.{self.module}", f"blk.{self.layer}"
            name, shape = f"{hf}_gate.weight", (1, self.hidden_size)
            specs["shared_gate"] = TensorSpec(name, shape, "exact", f"{gguf}.ffn_gate_inp_shexp.weight")
        return specs

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes; the token gate is a float32 vector."""
        return self.matrices.host_bytes(weights) + 4 * self.hidden_size * self.gated

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, shared experts"
        gate_of_tokens = ops.dequantise(pool, weights.checked(pool, "shared_gate"))[0] if self.gated else None
        return ops.SharedExperts(
            pool,
            **self.matrices.packed(weights, pool, where),
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
