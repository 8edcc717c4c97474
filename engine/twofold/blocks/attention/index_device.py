"""What indexers share on a device: keys of their own, rotated queries, and lists of the best positions or blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold._core.device import IndexChoice, IndexPages, IndexPools, IndexRows
from twofold.blocks.attention.chooser import chosen_by_sequence
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.rotation import Rotation, unrotated
from twofold.blocks.device_step import DeviceStep, NativeKernels

if TYPE_CHECKING:
    from torch import Tensor

Lists = Callable[[slice, "Tensor", "Tensor"], ChosenPositions]
"""See `chosen_by_sequence`."""


@dataclass(frozen=True)
class IndexNormsOnDevice:
    """Norms of an indexer's keys and queries; f32 [head_dim] each."""

    keys: Tensor | None
    """None: keys are stored as they are, not rotated either."""
    bias: Tensor | None
    """Bias of the LayerNorm of keys; None: keys have an RMSNorm."""
    eps: float
    queries: Tensor | None = None
    """RMSNorm; None: queries have no norm."""
    rotates_last: bool = False
    """Whether the last elements are rotated, not the first ones."""

    def store(
        self, rows: Tensor, q: Tensor, kept: Tensor, step: DeviceStep, rotation: Rotation | None
    ) -> Tensor:
        """Write normed and rotated keys to the cache, or keys as they are; return normed and rotated queries.

        Args:
            rows: bf16 [T, at least head_dim], of which keys are the first elements.
            q: bf16 [T, heads, head_dim].
        """
        import torch
        from torch.nn import functional

        native, dim = step.kernels.native, q.shape[2]
        cos, sin = unrotated(step) if rotation is None else rotation.angles(step)
        if native is not None:
            of_batch = IndexRows(
                keys=rows,
                stride=rows.stride(0),
                queries=q,
                num_tokens=len(q),
                num_heads=q.shape[1],
                query_norm=self.queries,
                norm=self.keys,
                bias=self.bias,
                epsilon=self.eps,
                cos=cos,
                sin=sin,
                rotary=2 * cos.shape[1],
                rotates_last=self.rotates_last,
                neighbours=rotation is not None and rotation.neighbours,
                slot_mapping=step.batch.slot_mapping,
            )
            rotated = torch.empty_like(q)
            native.device.index_store(of_batch, _pages(kept), rotated=rotated, stream=native.stream())
            return rotated
        queries, slots, last = q.float(), step.batch.slot_mapping, self.rotates_last
        if self.queries is not None:
            queries = functional.rms_norm(queries, (dim,), self.queries, self.eps)
        if rotation is not None:
            queries = rotation.rotated_end(queries, cos[:, None], sin[:, None], last=last)
        key = self._normed_keys(rows[:, :dim].float())
        if rotation is not None and self.keys is not None:
            key = rotation.rotated_end(key, cos, sin, last=last)
        kept.view(-1, dim)[slots[slots >= 0]] = key[slots >= 0].to(kept.dtype)
        return queries.to(q.dtype)

    def _normed_keys(self, keys: Tensor) -> Tensor:
        from torch.nn import functional

        if self.keys is None:
            return keys
        if self.bias is not None:
            return functional.layer_norm(keys, keys.shape[1:], self.keys, self.bias, self.eps)
        return functional.rms_norm(keys, keys.shape[1:], self.keys, self.eps)


@dataclass(frozen=True)
class PoolKeysOnDevice:
    """Keys of pools: the norm of the mean of their positions' keys, rotated, in place of the last position's."""

    pool: int
    """Positions of a pool."""
    norm: Tensor
    """f32 [head_dim]."""
    eps: float
    rotation: Rotation
    """Rotates the first elements, by the positions at which pools begin."""

    def store(self, kept: Tensor, step: DeviceStep) -> None:
        """Replace the keys of pools' last positions among the batch's rows, whose own keys are stored."""
        import torch
        from torch.nn import functional

        native, batch, dim = step.kernels.native, step.batch, kept.shape[3]
        sequences, (cos, sin) = batch.sequence_of_rows(), self.rotation.angles(step)
        if native is not None:
            tables = batch.page_tables
            pools = IndexPools(
                pool=self.pool,
                page_tables=tables,
                max_pages=tables.shape[1],
                sequences=sequences,
                positions=batch.positions,
                slot_mapping=batch.slot_mapping,
                num_tokens=len(batch.positions),
                norm=self.norm,
                epsilon=self.eps,
                cos=cos,
                sin=sin,
                rotary=2 * cos.shape[1],
            )
            native.device.index_pool(pools, _pages(kept), stream=native.stream())
            return
        ends = ((batch.positions + 1) % self.pool == 0) & (batch.slot_mapping >= 0)
        (rows,) = ends.nonzero(as_tuple=True)
        tables = batch.page_tables[rows if sequences is None else sequences[rows].long()]
        places = batch.positions[rows][:, None] - torch.arange(self.pool - 1, -1, -1, device=rows.device)
        pages = tables.long().gather(1, places // kept.shape[1])
        mean = kept.view(-1, dim)[pages * kept.shape[1] + places % kept.shape[1]].float().mean(1)
        mean = functional.rms_norm(mean, (dim,), self.norm, self.eps)
        mean = self.rotation.rotated_end(mean, cos[rows], sin[rows])
        kept.view(-1, dim)[batch.slot_mapping[rows]] = mean.to(kept.dtype)


@dataclass(frozen=True)
class Choice:
    """How many positions a query keeps, and what is chosen at once."""

    most: int
    block: int = 1
    """Positions of a block, or of a pool."""
    local: int = 0
    """Number of last blocks that are always kept."""
    pooled: bool = False
    """Whether whole pools are chosen, by the key of their last position, and positions after them are kept."""

    def positions(
        self, q: Tensor, weights: Tensor | None, kept: Tensor, step: DeviceStep, lists: Lists
    ) -> ChosenPositions:
        """Lists of a batch's rows: native for leading sequences of one token each, others by `lists`.

        Args:
            q: bf16 [T, heads, head_dim].
            weights: bf16 [T, heads]; None: each head has a list of its own, unless pools are chosen.
            kept: keys of the layer.
        """
        native = step.kernels.native
        num_decode = 0 if native is None else step.batch.sequences()[0]
        decoding = None
        if native is not None and num_decode > 0:
            decoding = self._decoding(native, q, weights, kept, step)
        others = chosen_by_sequence(step.batch, kept, lists, first=num_decode)
        found = decoding if others is None else others.after(decoding)
        assert found is not None
        return found

    def _decoding(
        self, native: NativeKernels, q: Tensor, weights: Tensor | None, kept: Tensor, step: DeviceStep
    ) -> ChosenPositions:
        import torch

        batch, (num_sequences, _) = step.batch, step.batch.sequences()
        tables = batch.page_tables[:num_sequences]
        lists = () if weights is not None or self.pooled else (q.shape[1],)
        positions = torch.empty((num_sequences, *lists, self.most), dtype=torch.int32, device=q.device)
        counts = torch.empty((num_sequences, *lists), dtype=torch.int32, device=q.device)
        max_length = min(native.max_length, tables.shape[1] * kept.shape[1])
        choice = IndexChoice(
            queries=q,
            weights=weights,
            stride=0 if weights is None else weights.stride(0),
            page_tables=tables,
            seq_lens=batch.seq_lens,
            num_sequences=num_sequences,
            num_heads=q.shape[1],
            max_pages=tables.shape[1],
            max_length=max_length,
            most=self.most,
            block=self.block,
            local=self.local,
            positions=positions,
            counts=counts,
            pooled=self.pooled,
        )
        scores = native.workspace(4 * counts.numel() * -(-max_length // self.block), q.device)
        native.device.index_choose(choice, _pages(kept), scores=scores, stream=native.stream())
        return ChosenPositions(positions, counts)


def _pages(kept: Tensor) -> IndexPages:
    return IndexPages(keys=kept, page_size=kept.shape[1], head_dim=kept.shape[3])
