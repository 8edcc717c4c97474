"""Grouped-query attention on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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

    from twofold.blocks.temperature import Temperature


class GqaFields(Protocol):
    """Fields of `blocks.gqa.Gqa` that its device operator reads."""

    @property
    def eps(self) -> float: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def value_scale(self) -> float: ...
    @property
    def flat_norms(self) -> bool: ...
    @property
    def rotated(self) -> bool: ...
    @property
    def rotation(self) -> int: ...
    @property
    def temperature(self) -> Temperature | None: ...
    @property
    def keys_are_values(self) -> bool: ...
    @property
    def kv_layer(self) -> int | None: ...
    @property
    def gated(self) -> bool: ...
    @property
    def gate_rows(self) -> int: ...
    @property
    def all_gate_rows(self) -> int: ...
    @property
    def softplus(self) -> bool: ...


@dataclass(frozen=True)
class GqaOnDevice:
    """See `blocks.gqa`. Where values are shorter than keys, both get zeros up to a length that kernels have."""

    attention: GqaFields
    shape: HeadShape
    norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    norms: Norms
    o: Tensor
    o_bias: Tensor | None
    sinks: Tensor | None
    """f32 [heads]."""
    q_scale: Tensor | None = None
    """f32 [head_dim], of the queries after rotation."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch
        from torch.nn import functional

        rows = hidden.bfloat16() if self.norm is None else normed(hidden, self.norm, self.attention.eps)
        qkv = functional.linear(rows, self.qkv, self.qkv_bias)
        kv, norms = KvLayer(*state), self.norms
        gate = None
        if self.attention.gated:
            qkv, gate = self._ungated(qkv)
        elif self.attention.gate_rows:
            qkv, gate = torch.tensor_split(qkv, (len(self.qkv) - self.attention.all_gate_rows,), dim=1)
            qkv, gate = qkv.contiguous(), gate.reshape(len(gate), self.shape.num_heads, -1)
        if self.attention.value_dim != self.shape.head_dim or self.attention.value_scale != 1.0:
            qkv = self._padded(qkv)
        if self.attention.flat_norms:
            qkv, norms = self._normed(qkv), (None, None, norms[2])
        if self.attention.keys_are_values and self.attention.kv_layer is None:
            qkv = torch.cat([qkv, qkv[:, -self.shape.num_kv_heads * self.shape.head_dim :]], 1)
        slots = step.batch.slot_mapping
        if self.attention.kv_layer is not None:  # keys and values are there already: nothing is stored
            qkv = functional.pad(qkv, (0, 2 * self.shape.num_kv_heads * self.shape.head_dim))
            slots = torch.full_like(slots, -1)
        cos, sin = step.rotations[self.attention.rotation]
        angles = (cos, sin) if self.attention.rotated else (cos[:, :0], sin[:, :0])
        q = step.kernels.rope_store(qkv, norms, angles, slots, kv, self.shape)
        if self.attention.temperature is not None:
            q = (q * self.attention.temperature.factors(step.batch.positions)[:, None, None]).to(q.dtype)
        if self.q_scale is not None:
            q = (q * self.q_scale).to(q.dtype)
        attended = self._attended(q, kv, step)[..., : self.attention.value_dim]
        if gate is not None:
            attended = attended * (functional.softplus(gate) if self.attention.softplus else gate.sigmoid())
        total += functional.linear(attended.flatten(1), self.o, self.o_bias)

    def _ungated(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """qkv without the gate rows, and the gates, [T, heads, head_dim]."""
        import torch

        shape = self.shape
        both = qkv[:, : 2 * shape.num_heads * shape.head_dim]
        q, gate = both.view(len(qkv), shape.num_heads, 2, shape.head_dim).unbind(2)
        return torch.cat([q.flatten(1), qkv[:, both.shape[1] :]], 1), gate

    def _padded(self, qkv: Tensor) -> Tensor:
        """qkv with scaled values, and with heads of the shape's length."""
        import torch
        from torch.nn import functional

        heads, size = self.shape.num_kv_heads, self.attention.value_dim
        q_and_k, values = torch.tensor_split(qkv, (qkv.shape[1] - heads * size,), dim=1)
        values = (values * self.attention.value_scale).reshape(len(qkv), heads, size)
        keys = q_and_k.reshape(len(qkv), -1, self.attention.head_dim)
        full = self.shape.head_dim
        parts = [functional.pad(part, (0, full - part.shape[2])).flatten(1) for part in (keys, values)]
        return torch.cat(parts, 1)

    def _normed(self, qkv: Tensor) -> Tensor:
        """qkv with the norms of q and k applied, each over all its heads."""
        import torch

        norms = self.norms[:2]
        sizes = [norm.numel() for norm in norms if norm is not None]
        *parts, v = torch.tensor_split(qkv, (sizes[0], sum(sizes)), dim=1)
        turned = [
            normed(part.float(), norm, self.shape.epsilon)
            for part, norm in zip(parts, norms, strict=True)
            if norm is not None
        ]
        return torch.cat([*turned, v], 1)

    def _attended(self, q: Tensor, kv: KvLayer, step: DeviceStep) -> Tensor:
        """Attention output; leading sequences of one token each share a launch."""
        import torch

        batch, kernels, shape = step.batch, step.kernels, self.shape
        num_decode, others = batch.sequences()
        parts = []
        if num_decode > 0:
            tables, lengths = batch.page_tables[:num_decode], batch.seq_lens[:num_decode]
            parts.append(kernels.decode_attention(q[:num_decode], tables, lengths, kv, shape, self.sinks))
        for s, rows in others:
            positions, seq_len = batch.positions[rows], batch.host_seq_lens[s]
            parts.append(
                kernels.prompt_attention(
                    q[rows], positions, batch.page_tables[s], seq_len, kv, shape, self.sinks
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
