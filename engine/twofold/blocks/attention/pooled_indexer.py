"""Learned indexer of Qwen3.8-Flash-Next (QSA): a query keeps pools of positions, and the newest ones after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser, chosen_by_sequence
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBatch, DeviceState, DeviceStep, DeviceWeights
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

    @property
    def missing_in_device_kernels(self) -> str | None:
        return "an indexer that chooses pools of positions"

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
            Linear(parts, "norm", self.eps).device(weights),
            weights.norm("index_q_norm"),
            weights.norm("index_k_norm"),
        )


@dataclass(frozen=True)
class PooledIndexerOnDevice:
    """`PooledIndexer` in plain torch; no kernel has it."""

    shape: PooledIndexer
    project: LinearOnDevice
    """Queries, then the key."""
    query_norm: Tensor
    key_norm: Tensor

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        from torch.nn import functional

        shape, (kept,), slots = self.shape, state, step.batch.slot_mapping
        rows, dim = self.project(hidden), shape.head_dim
        q = rows[:, :-dim].float().view(len(rows), shape.num_heads, dim)
        q = functional.rms_norm(q, (dim,), self.query_norm, shape.eps)
        cos, sin = shape.rotation.angles(step)
        q = shape.rotation.rotated_end(q, cos[:, None], sin[:, None])
        kept.view(-1, dim)[slots[slots >= 0]] = rows[slots >= 0, -dim:].to(kept.dtype)
        self._store_pools(kept, step)

        def lists(part: slice, keys: Tensor, own: Tensor) -> ChosenPositions:
            return self._lists(q[part], keys.float(), own)

        found = chosen_by_sequence(step.batch, kept, lists)
        assert found is not None
        return found

    def _store_pools(self, kept: Tensor, step: DeviceStep) -> None:
        """Replace the keys of pools' last positions."""
        import torch
        from torch.nn import functional

        shape, batch, dim = self.shape, step.batch, self.shape.head_dim
        ends = ((batch.positions + 1) % shape.pool == 0) & (batch.slot_mapping >= 0)
        (rows,) = ends.nonzero(as_tuple=True)
        back = torch.arange(shape.pool - 1, -1, -1, device=rows.device)
        places = batch.positions[rows][:, None] - back
        pages = _tables_of_rows(batch)[rows].long().gather(1, places // kept.shape[1])
        at = pages * kept.shape[1] + places % kept.shape[1]
        mean = kept.view(-1, dim)[at].float().mean(1)
        mean = functional.rms_norm(mean, (dim,), self.key_norm, shape.eps)
        cos, sin = shape.pool_rotation.angles(step)
        mean = shape.pool_rotation.rotated_end(mean, cos[rows], sin[rows])
        kept.view(-1, dim)[batch.slot_mapping[rows]] = mean.to(kept.dtype)

    def _lists(self, q: Tensor, keys: Tensor, own: Tensor) -> ChosenPositions:
        """Lists of a sequence's rows at positions `own` [Q]; f32 q [Q, heads, head_dim], keys [length, head_dim]."""
        import torch

        pool, num_pools = self.shape.pool, (own + 1) // self.shape.pool
        scores = torch.einsum("qhd,ld->qhl", q, keys[pool - 1 :: pool]).relu().sum(1)
        chosen = ChosenPositions.top(scores, num_pools - 1, self.shape.most_pools).of_blocks(pool, own)
        whole = num_pools * pool
        return chosen.followed_by(whole, own + 1 - whole, pool - 1)


def _tables_of_rows(batch: DeviceBatch) -> Tensor:
    """Block tables [T, max_pages], of each row's sequence."""
    import torch

    counts = torch.tensor(batch.query_lens or (1,) * len(batch.token_ids), device=batch.page_tables.device)
    return batch.page_tables[: len(counts)].repeat_interleave(counts, 0)
