"""Learned indexer of DeepSeek-V3.2 and GLM-5: small heads score earlier positions, the best ones are attended to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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

_PRODUCTS_AT_ONCE: Final = 1 << 24
"""Products of queries and keys that a device computes together for a prompt."""


@dataclass(frozen=True)
class Indexer(Chooser):
    """Scores position s for query t by the sum over heads h of w_h(t) * max(q_h(t) . k(s), 0).

    Published code also multiplies scores by constants, which do not change their order.
    """

    num_heads: int
    head_dim: int
    most: int
    """Number of positions that a query keeps."""
    rank: int
    """Elements of latent attention's low-rank queries, of which the heads' queries are products."""
    eps: float
    """Epsilon of the norm of the block's input."""
    rank_eps: float
    """Epsilon of the norm of low-rank queries."""
    rotation: Rotation
    """Rotates the first elements of queries and keys, or the last ones."""
    rotates_last: bool = False
    key_eps: float = 1e-6
    """Epsilon of the keys' LayerNorm; most families state it nowhere."""

    def tensors(self, found: HasTensor, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        heads, dim, of = self.num_heads, self.head_dim, names.matrix
        return {
            "index_q": of("indexer.wq_b", "indexer.attn_q_b", heads * dim, self.rank),
            "index_k": of("indexer.wk", "indexer.attn_k", dim, hidden),
            "index_weights": of("indexer.weights_proj", "indexer.proj", heads, hidden),
            "index_norm": names.norm("indexer.k_norm", "indexer.k_norm", dim),
            "index_norm_bias": names.bias("indexer.k_norm", "indexer.k_norm", dim),
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
        return 2.0 * self.num_heads * (self.head_dim + 1)

    @property
    def queries(self) -> Linear:
        return Linear(("index_q",), "q_norm", self.rank_eps)

    @property
    def keys(self) -> Linear:
        """Keys, then the weight of each head."""
        return Linear(("index_k", "index_weights"), "norm", self.eps)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser:
        norm = norm_part(weights.vector("index_norm"), self.key_eps) or {}
        return ops.Indexer(
            pool,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            queries=self.queries.cpu(weights, pool, "indexer"),
            keys=self.keys.cpu(weights, pool, "indexer"),
            key_norm=norm | {"bias": weights.vector("index_norm_bias")},
            rotation=self.rotation.cpu(),
            rotates_last=self.rotates_last,
        )

    def device(self, weights: DeviceWeights) -> IndexerOnDevice:
        return IndexerOnDevice(
            self,
            queries=self.queries.device(weights),
            keys=self.keys.device(weights),
            norms=IndexNormsOnDevice(
                weights.norm("index_norm"),
                weights.norm("index_norm_bias"),
                self.key_eps,
                rotates_last=self.rotates_last,
            ),
        )


@dataclass(frozen=True)
class IndexerOnDevice:
    """`Indexer` on a device."""

    shape: Indexer
    queries: LinearOnDevice
    keys: LinearOnDevice
    norms: IndexNormsOnDevice

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        shape, (kept,) = self.shape, state
        rows, q = self.keys(hidden), self.queries(projected[:, : shape.rank].float())
        q = q.view(len(q), shape.num_heads, shape.head_dim)
        q = self.norms.store(rows, q, kept, step, shape.rotation)
        weights = rows[:, shape.head_dim :]

        def lists(part: slice, keys: Tensor, own: Tensor) -> ChosenPositions:
            scores = _scores(q[part].float(), weights[part].float(), keys.float())
            return ChosenPositions.top(scores, own, shape.most)

        return Choice(shape.most).positions(q, weights, kept, step, lists)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """f32 [Q, length] for f32 q [Q, heads, head_dim], weights [Q, heads] and keys [length, head_dim]."""
    import torch

    at_once = max(1, _PRODUCTS_AT_ONCE // (q.shape[1] * max(1, len(keys))))
    parts = zip(torch.split(q, at_once), torch.split(weights, at_once), strict=True)
    return torch.cat([torch.einsum("qhl,qh->ql", (rows @ keys.T).relu(), w) for rows, w in parts])
