"""Learned indexer of GLM-5.3-Flash: a query keeps pools of positions, whose keys are joined by gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser, chosen_by_sequence
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.indexer import weighted_scores
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_KEY_EPS: Final = 1e-6
"""Epsilon of the keys' LayerNorm; not in any configuration."""


@dataclass(frozen=True)
class GatedPoolIndexer(Chooser):
    """Scores a pool for query t by the sum over heads h of w_h(t) * max(q_h(t) . k, 0).

    Its key k is the sum of its positions' keys by the softmax, over these positions, of a gate of each element plus a
    bias of the position in the pool. Positions after the last whole pool are chosen, too. Nothing is rotated.
    """

    num_heads: int
    head_dim: int
    pooled: int
    """Positions of a pool."""
    most_pools: int
    """Number of pools that a query keeps."""
    rank: int
    """Elements of latent attention's low-rank queries, of which the heads' queries are products."""
    eps: float
    """Epsilon of the norm of the block's input."""
    rank_eps: float
    """Epsilon of the norm of low-rank queries."""

    @property
    def most(self) -> int:
        """Number of positions that a query keeps, at most."""
        return (self.most_pools + 1) * self.pooled - 1

    def tensors(self, found: HasTensor, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        """Files of GGUF have no names for the gate and its bias."""
        heads, dim, of = self.num_heads, self.head_dim, names.matrix
        gate = names.exact("indexer.index_kpool_compress_gate", "", dim, hidden)
        return {
            "index_q": of("indexer.wq_b", "indexer.attn_q_b", heads * dim, self.rank),
            "index_k": of("indexer.wk", "indexer.attn_k", dim, hidden),
            "index_gate": replace(gate, role="matrix"),
            "index_weights": of("indexer.weights_proj", "indexer.proj", heads, hidden),
            "index_pool": names.exact("indexer.index_kpool_compress_ape", "", self.pooled, dim),
            "index_norm": names.norm("indexer.k_norm", "indexer.k_norm", dim),
            "index_norm_bias": names.bias("indexer.k_norm", "indexer.k_norm", dim),
        }

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """Keys and gates."""
        return ((2, self.head_dim),)

    @property
    def device_elements_per_token(self) -> int:
        """Queries and lists."""
        return self.num_heads * self.head_dim + self.most

    @property
    def flops_per_position(self) -> float:
        return 2.0 * self.num_heads * (self.head_dim + 1) / self.pooled

    @property
    def missing_in_device_kernels(self) -> str | None:
        return "an indexer of gated pools"

    @property
    def queries(self) -> Linear:
        return Linear(("index_q",), "q_norm", self.rank_eps)

    @property
    def keys(self) -> Linear:
        """Keys, their gates, then the weight of each head."""
        return Linear(("index_k", "index_gate", "index_weights"), "norm", self.eps)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser:
        norm = norm_part(weights.vector("index_norm"), _KEY_EPS) or {}
        return ops.Indexer(
            pool,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            queries=self.queries.cpu(weights, pool, "indexer"),
            keys=self.keys.cpu(weights, pool, "indexer"),
            key_norm=norm | {"bias": weights.vector("index_norm_bias")},
            pooled=self.pooled,
            pool_bias=ops.dequantise(pool, weights.checked(pool, "index_pool")),
        )

    def device(self, weights: DeviceWeights) -> GatedPoolIndexerOnDevice:
        return GatedPoolIndexerOnDevice(
            self,
            queries=self.queries.device(weights),
            keys=self.keys.device(weights),
            norm=weights.norm("index_norm"),
            norm_bias=weights.norm("index_norm_bias"),
            pool_bias=weights.exact("index_pool"),
        )


@dataclass(frozen=True)
class GatedPoolIndexerOnDevice:
    """`GatedPoolIndexer` in torch, which joins the keys of pools whenever it scores them."""

    shape: GatedPoolIndexer
    queries: LinearOnDevice
    keys: LinearOnDevice
    norm: Tensor
    norm_bias: Tensor
    pool_bias: Tensor
    """f32 [pooled, head_dim]."""

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        import torch
        from torch.nn import functional

        shape, (kept,), dim = self.shape, state, self.shape.head_dim
        rows, q = self.keys(hidden), self.queries(projected[:, : shape.rank].float())
        key = functional.layer_norm(rows[:, :dim].float(), (dim,), self.norm, self.norm_bias, _KEY_EPS)
        slots = step.batch.slot_mapping
        both = torch.cat([key, rows[:, dim : 2 * dim].float()], 1).to(kept.dtype)
        kept.view(-1, 2 * dim)[slots[slots >= 0]] = both[slots >= 0]
        q, weights = q.view(len(q), shape.num_heads, dim), rows[:, 2 * dim :]

        def lists(part: slice, keys: Tensor, own: Tensor) -> ChosenPositions:
            return self._lists(q[part].float(), weights[part].float(), keys.float(), own)

        found = chosen_by_sequence(step.batch, kept, lists)
        assert found is not None
        return found

    def _lists(self, q: Tensor, weights: Tensor, kept: Tensor, own: Tensor) -> ChosenPositions:
        """Lists of a sequence's rows at positions `own` [Q].

        Args:
            q: f32 [Q, heads, head_dim]. weights: f32 [Q, heads].
            kept: f32 [length, 2 head_dim], keys and gates.
        """
        count = self.shape.pooled
        keys, gates = kept[: len(kept) // count * count].view(-1, count, kept.shape[1]).chunk(2, 2)
        pools = ((gates + self.pool_bias).softmax(1) * keys).sum(1)
        whole = (own + 1) // count
        chosen = ChosenPositions.top(weighted_scores(q, weights, pools), whole - 1, self.shape.most_pools)
        return chosen.of_blocks(count, own).followed_by(whole * count, own + 1 - whole * count, count - 1)
