"""Learned indexer of DeepSeek-V3.2 and later: small heads score earlier positions, the best ones are attended to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.index_device import Choice, IndexNormsOnDevice
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.attention.query_scale import HeadScale, HeadScaleOnDevice
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
    rank: int | None
    """Elements of latent attention's low-rank queries, of which the heads' queries are products; None: they are
    products of the block's normed input after a LayerNorm."""
    eps: float
    """Epsilon of the norm of the block's input."""
    rank_eps: float
    """Epsilon of the norm of low-rank queries, or of the LayerNorm."""
    rotation: Rotation | None
    """Rotates the first elements of queries and keys, or the last ones; None: they carry no positions."""
    rotates_last: bool = False
    key_eps: float = 1e-6
    """Epsilon of the keys' LayerNorm; most families state it nowhere."""
    scale: HeadScale | None = None
    """Factors of the heads' queries."""

    def tensors(self, found: HasTensor, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
        heads, dim, of = self.num_heads, self.head_dim, names.matrix
        further = {} if self.scale is None else self.scale.tensors(names, heads)
        if self.rank is None:
            norm = "indexer.q_input_norm", "indexer.attn_q_norm", hidden
            further |= {"index_input_norm": names.norm(*norm), "index_input_norm_bias": names.bias(*norm)}
        return further | {
            "index_q": of("indexer.wq_b", "indexer.attn_q_b", heads * dim, self.rank or hidden),
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
        if self.rank is None:
            return Linear(("index_q",), "norm", self.eps)
        return Linear(("index_q",), "q_norm", self.rank_eps)

    @property
    def keys(self) -> Linear:
        """Keys, then the weight of each head."""
        return Linear(("index_k", "index_weights"), "norm", self.eps)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser:
        return ops.Indexer(
            pool,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            queries=self.queries.cpu(weights, pool, "indexer"),
            of_input=self.rank is None,
            input_norm=self._layer_norm(weights, "index_input_norm", self.rank_eps),
            keys=self.keys.cpu(weights, pool, "indexer"),
            key_norm=self._layer_norm(weights, "index_norm", self.key_eps),
            rotation=None if self.rotation is None else self.rotation.cpu(),
            rotates_last=self.rotates_last,
            scale=None if self.scale is None else self.scale.cpu(weights),
        )

    @staticmethod
    def _layer_norm(weights: BlockWeights, part: str, eps: float) -> CpuPart | None:
        norm = norm_part(weights.optional_vector(part), eps)
        return None if norm is None else norm | {"bias": weights.vector(f"{part}_bias")}

    def device(self, weights: DeviceWeights) -> IndexerOnDevice:
        norm = [weights.vector(f"index_input_norm{part}") for part in ("", "_bias")]
        return IndexerOnDevice(
            self,
            queries=self.queries.device(weights),
            input_norm=None if norm[0] is None or norm[1] is None else (norm[0], norm[1]),
            scale=None if self.scale is None else self.scale.device(weights),
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
    input_norm: tuple[Tensor, Tensor] | None = None
    """Weight and bias f32 [hidden] of the LayerNorm of the queries' input."""
    scale: HeadScaleOnDevice | None = None

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        shape, (kept,) = self.shape, state
        rows, q = self.keys(hidden), self._queries(hidden, projected)
        q = q.view(len(q), shape.num_heads, shape.head_dim)
        q = self.norms.store(rows, q, kept, step, shape.rotation)
        if self.scale is not None:
            q = q * self.scale.factors(step.batch.positions)[..., None].to(q.dtype)
        weights = rows[:, shape.head_dim :]

        def lists(part: slice, keys: Tensor, own: Tensor) -> ChosenPositions:
            scores = weighted_scores(q[part].float(), weights[part].float(), keys.float())
            return ChosenPositions.top(scores, own, shape.most)

        return Choice(shape.most).positions(q, weights, kept, step, lists)

    def _queries(self, hidden: Tensor, projected: Tensor) -> Tensor:
        from torch.nn import functional

        if self.input_norm is None:
            return self.queries(projected[:, : self.shape.rank].float())
        rows = hidden.float()
        if self.queries.norm is not None:
            rows = functional.rms_norm(rows, rows.shape[1:], self.queries.norm, self.queries.eps)
        rows = functional.layer_norm(rows, rows.shape[1:], *self.input_norm, self.shape.rank_eps)
        return functional.linear(rows.bfloat16(), self.queries.weight)


def weighted_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """f32 [Q, length] for f32 q [Q, heads, head_dim], weights [Q, heads] and keys [length, head_dim]."""
    import torch

    at_once = max(1, _PRODUCTS_AT_ONCE // (q.shape[1] * max(1, len(keys))))
    parts = zip(torch.split(q, at_once), torch.split(weights, at_once), strict=True)
    return torch.cat([torch.einsum("qhl,qh->ql", (rows @ keys.T).relu(), w) for rows, w in parts])
