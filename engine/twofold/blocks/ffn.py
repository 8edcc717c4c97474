"""A dense gated feed-forward layer, with its own norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, GatedFfn, normed
from twofold.blocks.gated_matrices import GatedMatrices
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import Activation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DenseFfn(Block):
    kind: ClassVar[str] = "dense"

    hidden_size: int
    intermediate_size: int
    eps: float
    gguf_norm: str = "ffn_norm"
    """Name of the norm in GGUF files."""
    zero_centred: bool = False
    """Whether checkpoints store the norm minus 1."""
    module: str = "mlp"
    """Module name in checkpoints."""
    norm: str = "post_attention_layernorm"
    """Name of the norm in checkpoints."""
    activation: Activation = "silu"
    """Activation function of the gate."""
    limit: float = 0.0
    """Bound of gate and up (kernels/include/twofold/expert.h); 0: none."""
    fused: tuple[str, str] | None = None
    """Checkpoint names of (gate and up, down), if some checkpoints fuse gate and up."""

    @property
    def matrices(self) -> GatedMatrices:
        return GatedMatrices(
            self.layer, self.module, hidden=self.hidden_size, inner=self.intermediate_size, fused=self.fused
        )

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        norm = TensorSpec(
            f"{hf}.{self.norm}.weight",
            (self.hidden_size,),
            "exact",
            f"{gguf}.{self.gguf_norm}.weight",
            zero_centred=self.zero_centred,
        )
        return {"norm": norm} | self.matrices.tensors(found)

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes; the norm is a float32 vector."""
        return self.matrices.host_bytes(weights) + 4 * self.hidden_size

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, feed-forward"
        return ops.DenseFfn(
            pool,
            norm_weight=weights.vector("norm"),
            **self.matrices.packed(weights, pool, where),
            eps=self.eps,
            activation=self.activation,
            limit=self.limit,
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        ffn = GatedFfn.of(weights, self.activation, self.limit)
        return DenseFfnOnDevice(weights.norm(), ffn, self.eps)


@dataclass(frozen=True)
class DenseFfnOnDevice:
    norm: Tensor
    ffn: GatedFfn
    eps: float

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        total += self.ffn(normed(hidden, self.norm, self.eps))
