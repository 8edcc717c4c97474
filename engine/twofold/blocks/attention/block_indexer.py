"""Learned indexer of MiniMax-M3: each key head has a small head that chooses blocks of positions for its queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.index_device import Choice, IndexNormsOnDevice
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockIndexer(Chooser):
    """Scores a block of positions for head h of query t by the largest q_h(t) . k(s) among its positions s <= t."""

    num_heads: int
    """As many as key heads of the layer."""
    head_dim: int
    block: int
    """Positions of a block."""
    most_blocks: int
    """Number of blocks that a query keeps for each head."""
    local: int
    """Number of last blocks that are always kept, the query's own included."""
    eps: float
    """Epsilon of all norms."""
    rotation: Rotation
    """Rotates the first elements of queries and keys."""

    @property
    def most(self) -> int:
        """Number of positions that a query keeps, at most."""
        return self.most_blocks * self.block

    def tensors(self, found: HasTensor, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        heads, dim = self.num_heads, self.head_dim
        return {
            "index_q": names.matrix("indexer.q_proj", "indexer.q_proj", heads * dim, hidden),
            "index_k": names.matrix("indexer.k_proj", "indexer.k_proj", dim, hidden),
            "index_q_norm": names.norm("indexer.q_norm", "indexer.q_norm", dim),
            "index_k_norm": names.norm("indexer.k_norm", "indexer.k_norm", dim),
        }

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        return ((1, self.head_dim),)

    @property
    def device_elements_per_token(self) -> int:
        """Queries and lists."""
        return self.num_heads * (self.head_dim + self.most)

    @property
    def flops_per_position(self) -> float:
        return 2.0 * self.num_heads * self.head_dim

    def _linear(self, part: str) -> Linear:
        return Linear((part,), "norm", self.eps)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser:
        return ops.Indexer(
            pool,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            queries=self._linear("index_q").cpu(weights, pool, "indexer"),
            of_input=True,
            keys=self._linear("index_k").cpu(weights, pool, "indexer"),
            query_norm=norm_part(weights.vector("index_q_norm"), self.eps),
            key_norm=norm_part(weights.vector("index_k_norm"), self.eps),
            rotation=self.rotation.cpu(),
            block=self.block,
            local=self.local or None,
        )

    def device(self, weights: DeviceWeights) -> BlockIndexerOnDevice:
        return BlockIndexerOnDevice(
            self,
            queries=self._linear("index_q").device(weights),
            keys=self._linear("index_k").device(weights),
            norms=IndexNormsOnDevice(
                weights.norm("index_k_norm"), None, self.eps, queries=weights.norm("index_q_norm")
            ),
        )


@dataclass(frozen=True)
class BlockIndexerOnDevice:
    """`BlockIndexer` on a device."""

    shape: BlockIndexer
    queries: LinearOnDevice
    keys: LinearOnDevice
    norms: IndexNormsOnDevice

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        shape, (kept,) = self.shape, state
        q = self.queries(hidden)
        q = q.view(len(q), shape.num_heads, shape.head_dim)
        q = self.norms.store(self.keys(hidden), q, kept, step, shape.rotation)

        def lists(part: slice, keys: Tensor, own: Tensor) -> ChosenPositions:
            return self._lists(q[part].float(), keys.float(), own)

        return Choice(shape.most, shape.block, shape.local).positions(q, None, kept, step, lists)

    def _lists(self, q: Tensor, keys: Tensor, own: Tensor) -> ChosenPositions:
        """Lists of a sequence's rows at positions `own` [Q]; f32 q [Q, heads, head_dim], keys [length, head_dim]."""
        import torch

        shape, length = self.shape, len(keys)
        num_blocks = -(-length // shape.block)
        scores = torch.einsum("qhd,ld->qhl", q, keys)
        scores = scores.masked_fill(torch.arange(length, device=q.device) > own[:, None, None], -torch.inf)
        scores = torch.nn.functional.pad(scores, (0, num_blocks * shape.block - length), value=-torch.inf)
        best = scores.view(*q.shape[:2], num_blocks, shape.block).amax(3)
        newest = (own // shape.block)[:, None].expand(-1, shape.num_heads).flatten()
        numbers = torch.arange(num_blocks, device=q.device)
        best = best.flatten(0, 1).masked_fill(numbers > newest[:, None] - shape.local, torch.inf)
        blocks = ChosenPositions.top(best, newest, shape.most_blocks)
        return blocks.of_blocks(shape.block, own.repeat_interleave(shape.num_heads)).by_head(shape.num_heads)
