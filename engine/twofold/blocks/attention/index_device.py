"""What indexers share on a device: keys of their own, rotated queries, and lists of the best positions or blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold._core.device import IndexChoice, IndexPages, IndexRows
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

    keys: Tensor
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
        """Write normed and rotated keys to the cache; return normed and rotated queries.

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
        key, queries = rows[:, :dim].float(), q.float()
        if self.bias is not None:
            key = functional.layer_norm(key, (dim,), self.keys, self.bias, self.eps)
        else:
            key = functional.rms_norm(key, (dim,), self.keys, self.eps)
        if self.queries is not None:
            queries = functional.rms_norm(queries, (dim,), self.queries, self.eps)
        slots, last = step.batch.slot_mapping, self.rotates_last
        if rotation is not None:
            key = rotation.rotated_end(key, cos, sin, last=last)
            queries = rotation.rotated_end(queries, cos[:, None], sin[:, None], last=last)
        kept.view(-1, dim)[slots[slots >= 0]] = key[slots >= 0].to(kept.dtype)
        return queries.to(q.dtype)


@dataclass(frozen=True)
class Choice:
    """How many positions a query keeps, and what is chosen at once."""

    most: int
    block: int = 1
    """Positions of a block."""
    local: int = 0
    """Number of last blocks that are always kept."""

    def positions(
        self, q: Tensor, weights: Tensor | None, kept: Tensor, step: DeviceStep, lists: Lists
    ) -> ChosenPositions:
        """Lists of a batch's rows: native for leading sequences of one token each, others by `lists`.

        Args:
            q: bf16 [T, heads, head_dim].
            weights: bf16 [T, heads]; None: each head has a list of its own.
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
        lists = () if weights is not None else (q.shape[1],)
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
        )
        scores = native.workspace(4 * counts.numel() * -(-max_length // self.block), q.device)
        native.device.index_choose(choice, _pages(kept), scores=scores, stream=native.stream())
        return ChosenPositions(positions, counts)


def _pages(kept: Tensor) -> IndexPages:
    return IndexPages(keys=kept, page_size=kept.shape[1], head_dim=kept.shape[3])
