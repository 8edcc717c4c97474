"""Grouped-query attention on a device: the parts' operators in the order of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twofold.blocks.attention.linear import LinearOnDevice
from twofold.blocks.attention.rotation import unrotated
from twofold.blocks.device_step import (
    DeviceState,
    DeviceStep,
    HeadShape,
    KvLayer,
    Norms,
    normed,
)

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.blocks.attention.chosen import ChosenPositions
    from twofold.blocks.attention.gate import Gate
    from twofold.blocks.attention.norms import HeadNorms
    from twofold.blocks.attention.projections import Heads, Projections
    from twofold.blocks.attention.query_scale import QueryScale
    from twofold.blocks.attention.rotation import Rotation
    from twofold.blocks.attention.selection import SelectionOnDevice


class GqaComposition(Protocol):
    """`blocks.gqa.Gqa` as its device operator reads it."""

    @property
    def heads(self) -> Heads: ...
    @property
    def project(self) -> Projections: ...
    @property
    def norms(self) -> HeadNorms: ...
    @property
    def rotation(self) -> Rotation | None: ...
    @property
    def scale(self) -> QueryScale | None: ...
    @property
    def gate(self) -> Gate | None: ...
    @property
    def gate_rows(self) -> int: ...


@dataclass(frozen=True)
class GqaOnDevice:
    """See `blocks.gqa`. Where values are shorter than keys, both get zeros up to a length that kernels have."""

    attention: GqaComposition
    shape: HeadShape
    project: LinearOnDevice
    norms: Norms
    query_factors: Tensor | None
    """f32 [head_dim], of the queries after rotation."""
    select: SelectionOnDevice
    sinks: Tensor | None
    """f32 [heads]."""
    out: LinearOnDevice

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        attention, kv = self.attention, KvLayer(*state[:2])
        projected = self.project(hidden)
        qkv, gate = self._ungated(projected)
        q = self._stored(qkv, kv, step)
        chosen = self.select.prepare(hidden, projected, state[2:], step)
        if attention.scale is not None:
            q = (q * attention.scale.factors(step.batch.positions)[..., None]).to(q.dtype)
        if self.query_factors is not None:
            q = (q * self.query_factors).to(q.dtype)
        attended = self._attended(q, kv, step, chosen)[..., : attention.heads.value_dim]
        if attention.gate is not None and gate is not None:
            attended = attention.gate.apply(attended, gate)
        total += self.out(attended.flatten(1))

    def _ungated(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """qkv without the gate rows, and the gates, [T, heads, head_dim or 1]."""
        import torch

        attention, heads = self.attention, self.attention.heads
        if attention.gate is None:
            return qkv, None
        if attention.gate_rows:
            qkv, gate = torch.tensor_split(qkv, (qkv.shape[1] - attention.gate_rows,), dim=1)
            return qkv.contiguous(), gate.reshape(len(gate), heads.num, -1)
        both = qkv[:, : 2 * heads.num * heads.dim]
        q, gate = both.view(len(qkv), heads.num, 2, heads.dim).unbind(2)
        return torch.cat([q.flatten(1), qkv[:, both.shape[1] :]], 1), gate

    def _stored(self, qkv: Tensor, kv: KvLayer, step: DeviceStep) -> Tensor:
        """Normed and rotated queries bf16 [T, heads, head_dim]; keys and values are stored."""
        import torch
        from torch.nn import functional

        attention, shape, norms, slots = self.attention, self.shape, self.norms, step.batch.slot_mapping
        heads, project = attention.heads, attention.project
        if heads.value_dim != shape.head_dim or project.value_scale != 1.0:
            qkv = project.padded(qkv, heads, shape.head_dim)
        if attention.norms.qk == "flat":
            qkv, norms = self._normed(qkv), (None, None, norms[2])
        kv_elements = shape.num_kv_heads * shape.head_dim
        if project.kv_layer is not None:  # keys and values are there already: nothing is stored
            qkv = functional.pad(qkv, (0, 2 * kv_elements))
            slots = torch.full_like(slots, -1)
        elif project.keys_are_values:
            qkv = torch.cat([qkv, qkv[:, -kv_elements:]], 1)
        angles = unrotated(step) if attention.rotation is None else attention.rotation.angles(step)
        return step.kernels.rope_store(qkv, norms, angles, slots, kv, shape)

    def _normed(self, qkv: Tensor) -> Tensor:
        """qkv with the norms of q and k applied, each over all its heads."""
        import torch

        norms = self.norms[:2]
        sizes = [norm.numel() for norm in norms if norm is not None]
        *parts, v = torch.tensor_split(qkv, (sizes[0], sum(sizes)), dim=1)
        rotated_heads = [
            normed(part.float(), norm, self.shape.epsilon)
            for part, norm in zip(parts, norms, strict=True)
            if norm is not None
        ]
        return torch.cat([*rotated_heads, v], 1)

    def _attended(self, q: Tensor, kv: KvLayer, step: DeviceStep, chosen: ChosenPositions | None) -> Tensor:
        """Attention output; leading sequences of one token each share a launch."""
        import torch

        batch, kernels, shape = step.batch, step.kernels, self.shape
        num_decode, others = batch.sequences()
        parts = []
        if num_decode > 0:
            tables, lengths = batch.page_tables[:num_decode], batch.seq_lens[:num_decode]
            own = None if chosen is None else chosen.of(slice(0, num_decode))
            parts.append(
                kernels.decode_attention(q[:num_decode], tables, lengths, kv, shape, self.sinks, own)
            )
        for s, rows in others:
            positions, seq_len = batch.positions[rows], batch.host_seq_lens[s]
            pages, own = batch.page_tables[s], None if chosen is None else chosen.of(rows)
            ends = batch.ends_of(rows)
            parts.append(
                kernels.prompt_attention(
                    q[rows], positions, pages, seq_len, kv, shape, self.sinks, own, ends=ends
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
