"""Input of a layer that predicts the token after the next one (multi-token prediction).

DeepSeek-V3 (arXiv 2412.19437, section 2.2): the next token's embedding and the hidden state of the token before it are
normed, joined, and projected to the hidden size. An ordinary layer follows, then a norm and the model's own head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from twofold.blocks import ops
from twofold.blocks.block import Block
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights, normed
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MtpInput(Block):
    """First block of an MTP layer. Names are those of DeepSeek-V3's checkpoints."""

    kind: ClassVar[str] = "dense"

    hidden_size: int
    eps: float
    own_norm: bool = True
    """Whether the layer has a norm before the head; otherwise it is the model's."""
    zero_centred: bool = False
    """Whether checkpoints store norms minus 1."""
    num_streams: int = 1
    """Residual streams, each of which reads its own of the token before."""
    apart: bool = False
    """Whether checkpoints have the projections of embedding and hidden state as two tensors."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}", f"blk.{self.layer}.nextn"
        norms = {"embedding_norm": ("enorm", "enorm"), "hidden_norm": ("hnorm", "hnorm")}
        if self.own_norm:
            norms["norm"] = ("shared_head.norm", "shared_head_norm")
        hidden = self.hidden_size
        sizes = {"hidden_norm": self.num_streams * hidden}
        joined = TensorSpec(f"{hf}.eh_proj.weight", (hidden, 2 * hidden), "matrix", f"{gguf}.eh_proj.weight")
        matrices = {"projection": joined}
        if self.apart and not found(joined):
            matrices = {
                f"of_{part}": TensorSpec(f"{hf}.fc_{part}.weight", (hidden, hidden), "matrix", "")
                for part in ("embedding", "hidden")
            }
        return {
            **matrices,
            **{
                part: TensorSpec(
                    f"{hf}.{name}.weight",
                    (sizes.get(part, hidden),),
                    "exact",
                    f"{gguf}.{theirs}.weight",
                    zero_centred=self.zero_centred,
                )
                for part, (name, theirs) in norms.items()
            },
        }

    def head_norm(self, weights: BlockWeights) -> F32 | None:
        """Weights of the norm before the head; None: the model's."""
        return weights.optional_vector("norm")

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        return ops.MtpInput(
            pool,
            embedding_norm=weights.vector("embedding_norm"),
            hidden_norm=weights.vector("hidden_norm"),
            eps=self.eps,
            num_streams=self.num_streams,
            **{
                part: weights.packed(pool, f"layer {self.layer}, prediction", part)
                for part in ("projection", "of_embedding", "of_hidden")
                if part in weights
            },
        )

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        norms = weights.norm("embedding_norm"), weights.norm("hidden_norm")
        return MtpInputOnDevice(*norms, weights.matrix("projection"), self.eps)


@dataclass(frozen=True)
class MtpInputOnDevice:
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Tensor
    eps: float

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """Replace `total` by the projection of `hidden`, the embeddings, and `step.previous`."""
        import torch
        from torch.nn.functional import linear

        assert step.previous is not None, "an MTP layer without hidden states"
        embedded = normed(hidden, self.embedding_norm, self.eps)
        before = normed(step.previous, self.hidden_norm, self.eps)
        total.copy_(linear(torch.cat([embedded, before], -1), self.projection))
