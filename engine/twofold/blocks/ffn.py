"""A dense gated feed-forward layer, with its own norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, GatedFfn, normed
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

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}"
        wide, narrow = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        norm = TensorSpec(
            f"{hf}.{self.norm}.weight",
            (self.hidden_size,),
            "exact",
            f"{gguf}.{self.gguf_norm}.weight",
            zero_centred=self.zero_centred,
        )
        return {"norm": norm} | {
            part: TensorSpec(
                f"{hf}.{self.module}.{part}_proj.weight", shape, "matrix", f"{gguf}.ffn_{part}.weight"
            )
            for part, shape in (("gate", wide), ("up", wide), ("down", narrow))
        }

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, feed-forward"
        return ops.DenseFfn(
            pool,
            norm_weight=weights.vector("norm"),
            gate=weights.packed(pool, where, "gate"),
            up=weights.packed(pool, where, "up"),
            down=weights.packed(pool, where, "down"),
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
