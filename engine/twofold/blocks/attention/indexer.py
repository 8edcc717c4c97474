"""Learned indexer of DeepSeek-V3.2 and GLM-5: small heads score earlier positions, the best ones are attended to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twofold._core.device import IndexChoice, IndexPages, IndexRows
from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser, chosen_by_sequence
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

_KEY_EPS: Final = 1e-6
"""Epsilon of the keys' LayerNorm; not in any configuration."""
_SCORES_AT_ONCE: Final = 1 << 26
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
    """Of the first elements of queries and keys."""

    def tensors(self, names: LayerNames, hidden: int) -> Mapping[str, TensorSpec]:
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
        norm = norm_part(weights.vector("index_norm"), _KEY_EPS) or {}
        return ops.Indexer(
            pool,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            queries=self.queries.cpu(weights, pool, "indexer"),
            keys=self.keys.cpu(weights, pool, "indexer"),
            key_norm=norm | {"bias": weights.vector("index_norm_bias")},
            rotation=self.rotation.cpu(),
        )

    def device(self, weights: DeviceWeights) -> IndexerOnDevice:
        return IndexerOnDevice(
            self,
            queries=self.queries.device(weights),
            keys=self.keys.device(weights),
            norm=weights.norm("index_norm"),
            bias=weights.norm("index_norm_bias"),
        )


@dataclass(frozen=True)
class IndexerOnDevice:
    """`Indexer` on a device."""

    shape: Indexer
    queries: LinearOnDevice
    keys: LinearOnDevice
    norm: Tensor
    bias: Tensor

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        shape, (kept,) = self.shape, state
        rows, q = self.keys(hidden), self.queries(projected[:, : shape.rank].float())
        weights = rows[:, shape.head_dim :]
        q = self._store(rows, q.view(len(q), shape.num_heads, shape.head_dim), kept, step)
        native, num_decode = step.kernels.native, step.batch.sequences()[0] if step.kernels.native else 0
        decoding = None
        if native is not None and num_decode > 0:
            decoding = self._choose_decoding(q, weights, kept, step, num_decode)

        def lists(part: slice, keys: Tensor, own: Tensor) -> ChosenPositions:
            scores = _scores(q[part].float(), weights[part].float(), keys.float())
            return ChosenPositions.top(scores, own, shape.most)

        prompts = chosen_by_sequence(step.batch, kept, lists, first=num_decode)
        found = decoding if prompts is None else prompts.after(decoding)
        assert found is not None
        return found

    def _store(self, rows: Tensor, q: Tensor, kept: Tensor, step: DeviceStep) -> Tensor:
        """Write normalised and rotated keys to the cache; return rotated queries."""
        import torch
        from torch.nn import functional

        shape, native = self.shape, step.kernels.native
        cos, sin = shape.rotation.angles(step)
        if native is not None:
            of_batch = IndexRows(
                keys=rows,
                stride=rows.stride(0),
                queries=q,
                num_tokens=len(q),
                num_heads=shape.num_heads,
                norm=self.norm,
                bias=self.bias,
                epsilon=_KEY_EPS,
                cos=cos,
                sin=sin,
                rotary=2 * cos.shape[1],
                neighbours=shape.rotation.neighbours,
                slot_mapping=step.batch.slot_mapping,
            )
            rotated = torch.empty_like(q)
            native.device.index_store(of_batch, self._pages(kept), rotated=rotated, stream=native.stream())
            return rotated
        key = rows[:, : shape.head_dim].float()
        key = functional.layer_norm(key, key.shape[1:], self.norm, self.bias, _KEY_EPS)
        slots, key = step.batch.slot_mapping, shape.rotation.rotated_first(key, cos, sin)
        kept.view(-1, shape.head_dim)[slots[slots >= 0]] = key[slots >= 0].to(kept.dtype)
        return shape.rotation.rotated_first(q.float(), cos[:, None], sin[:, None]).to(q.dtype)

    def _choose_decoding(
        self, q: Tensor, weights: Tensor, kept: Tensor, step: DeviceStep, num_sequences: int
    ) -> ChosenPositions:
        """Lists of the leading sequences of one token each."""
        import torch

        native, shape, batch = step.kernels.native, self.shape, step.batch
        assert native is not None
        tables = batch.page_tables[:num_sequences]
        max_length = min(native.max_length, tables.shape[1] * kept.shape[1])
        positions = torch.empty((num_sequences, shape.most), dtype=torch.int32, device=q.device)
        counts = torch.empty(num_sequences, dtype=torch.int32, device=q.device)
        choice = IndexChoice(
            queries=q,
            weights=weights,
            stride=weights.stride(0),
            page_tables=tables,
            seq_lens=batch.seq_lens,
            num_sequences=num_sequences,
            num_heads=shape.num_heads,
            max_pages=tables.shape[1],
            max_length=max_length,
            most=shape.most,
            positions=positions,
            counts=counts,
        )
        scores = native.workspace(4 * num_sequences * max_length, q.device)
        native.device.index_choose(choice, self._pages(kept), scores=scores, stream=native.stream())
        return ChosenPositions(positions, counts)

    def _pages(self, kept: Tensor) -> IndexPages:
        return IndexPages(keys=kept, page_size=kept.shape[1], head_dim=self.shape.head_dim)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """f32 [Q, length] for f32 q [Q, heads, head_dim], weights [Q, heads] and keys [length, head_dim]."""
    import torch

    at_once = max(1, _SCORES_AT_ONCE // (q.shape[1] * max(1, len(keys))))
    parts = zip(torch.split(q, at_once), torch.split(weights, at_once), strict=True)
    return torch.cat([torch.einsum("qhl,qh->ql", (rows @ keys.T).relu(), w) for rows, w in parts])
