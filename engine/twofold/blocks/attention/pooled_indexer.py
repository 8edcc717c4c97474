"""Learned indexer of Qwen3.8-Flash-Next (QSA): a query keeps pools of positions, and the newest ones after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.index_device import Choice, IndexNormsOnDevice, PoolKeysOnDevice
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_JOINED = "index_qk"


@dataclass(frozen=True)
class PooledIndexer(Chooser):
    """Scores `pool` consecutive positions for query t by the sum over heads h of max(q_h(t) . k, 0).

    k is the norm of the mean of the positions' keys, rotated as the first of them. A row of the layer's plane holds a
    position's key; that of a pool's last position holds k instead, once the position is computed.
    """

    num_heads: int
    head_dim: int
    pool: int
    """Positions of a pool."""
    most_pools: int
    """Number of pools that a query keeps, of those whose positions are all up to its own."""
    eps: float
    """Epsilon of all norms."""
    rotation: Rotation
    """Rotates the first elements of queries."""
    pool_rotation: Rotation
    """The same of keys, by the positions at which pools begin."""

    @property
    def most(self) -> int:
        """Number of positions that a query keeps, at most."""
        return self.most_pools * self.pool + self.pool - 1

    def tensors(self, found: HasTensor, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        """Queries and keys are rows of one tensor in checkpoints, and two tensors in GGUF files."""
        queries, dim = self.num_heads * self.head_dim, self.head_dim
        joined = names.matrix("indexer.index_qk_proj", "", queries + dim, hidden)
        matrices = {_JOINED: joined}
        if not found(joined):
            matrices = {
                "index_q": names.matrix("indexer.q_proj", "indexer.q_proj", queries, hidden),
                "index_k": names.matrix("indexer.k_proj", "indexer.k_proj", dim, hidden),
            }
        return matrices | {
            "index_q_norm": names.norm("indexer.q_layernorm", "indexer.q_norm", dim),
            "index_k_norm": names.norm("indexer.k_layernorm", "indexer.k_norm", dim),
        }

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        return ((1, self.head_dim),)

    @property
    def device_elements_per_token(self) -> int:
        """Queries and lists."""
        return self.num_heads * self.head_dim + self.most

    @property
    def flops_per_position(self) -> float:
        return 2.0 * self.num_heads * (self.head_dim + 1) / self.pool

    def _linear(self, weights: BlockWeights, pool: ops.ThreadPool, part: str) -> CpuPart:
        """The product that gives queries ("index_q") or keys."""
        if _JOINED not in weights:
            return Linear((part,), "norm", self.eps).cpu(weights, pool, "indexer")
        cut, rows = self.num_heads * self.head_dim, weights.specs[_JOINED].shape[0]
        begin, end = (0, cut) if part == "index_q" else (cut, rows)
        packed = weights.pack(
            pool,
            "indexer",
            f"{weights.specs[_JOINED].name}: {part}",
            lambda: [weights.matrix(_JOINED).row_range(begin, end)],
            rows=[(_JOINED, range(begin, end))],
        )
        norm = weights.optional_vector("norm")
        return {"weight": packed} | ({} if norm is None else {"norm": norm, "eps": self.eps})

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser:
        return ops.Indexer(
            pool,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            queries=self._linear(weights, pool, "index_q"),
            of_input=True,
            keys=self._linear(weights, pool, "index_k"),
            query_norm=norm_part(weights.vector("index_q_norm"), self.eps),
            key_norm=norm_part(weights.vector("index_k_norm"), self.eps),
            rotation=self.rotation.cpu(),
            pooled=self.pool,
            pool_rotation=self.pool_rotation.cpu(),
        )

    def device(self, weights: DeviceWeights) -> PooledIndexerOnDevice:
        parts = (_JOINED,) if _JOINED in weights.source else ("index_q", "index_k")
        return PooledIndexerOnDevice(
            self,
            project=Linear(parts, "norm", self.eps).device(weights),
            norms=IndexNormsOnDevice(None, None, self.eps, queries=weights.norm("index_q_norm")),
            pools=PoolKeysOnDevice(self.pool, weights.norm("index_k_norm"), self.eps, self.pool_rotation),
        )


@dataclass(frozen=True)
class PooledIndexerOnDevice:
    """`PooledIndexer` on a device."""

    shape: PooledIndexer
    project: LinearOnDevice
    """Queries, then the key."""
    norms: IndexNormsOnDevice
    pools: PoolKeysOnDevice

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        shape, (kept,) = self.shape, state
        rows, dim = self.project(hidden), shape.head_dim
        q = rows[:, :-dim].contiguous().view(len(rows), shape.num_heads, dim)
        q = self.norms.store(rows[:, -dim:], q, kept, step, shape.rotation)
        self.pools.store(kept, step)

        def lists(part: slice, keys: Tensor, own: Tensor) -> ChosenPositions:
            return self._lists(q[part].float(), keys.float(), own)

        return Choice(shape.most, shape.pool, pooled=True).positions(q, None, kept, step, lists)

    def _lists(self, q: Tensor, keys: Tensor, own: Tensor) -> ChosenPositions:
        """Lists of a sequence's rows at positions `own` [Q]; f32 q [Q, heads, head_dim], keys [length, head_dim]."""
        import torch

        pool, num_pools = self.shape.pool, (own + 1) // self.shape.pool
        scores = torch.einsum("qhd,ld->qhl", q, keys[pool - 1 :: pool]).relu().sum(1)
        chosen = ChosenPositions.top(scores, num_pools - 1, self.shape.most_pools).of_blocks(pool, own)
        whole = num_pools * pool
        return chosen.followed_by(whole, own + 1 - whole, pool - 1)
