"""Gated delta net on a device: the operator of `blocks.gated_delta`.

The per-sequence state tolerates a token computed twice after a lost step: it holds the state before the last token and
that token's update separately; the convolution's inputs lie in slots by position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks.gated_delta import BLOCK_COLUMNS, GatedDelta

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.blocks.device_step import DeviceState, DeviceStep


@dataclass(frozen=True)
class GatedDeltaOnDevice:
    """Device operator of a gated delta net. Without native kernels, plain torch (the reference)."""

    shape: GatedDelta
    norm: Tensor
    projections: Tensor
    """Rows of all queries, all keys, all values (the channels), then z, b, a."""
    conv: Tensor
    """f32 [channels, taps]."""
    decay_rate: Tensor
    decay_bias: Tensor
    head_norm: Tensor
    out: Tensor

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch
        from torch.nn import functional

        from twofold.blocks.device_step import normed

        shape, batch = self.shape, step.batch
        projected = functional.linear(normed(hidden, self.norm, shape.eps), self.projections)
        attended = torch.empty(
            (len(hidden), shape.num_v_heads, shape.value_dim), dtype=torch.float32, device=hidden.device
        )
        for records, rows in batch.by_record():
            positions = batch.positions[rows]
            self._recur(projected[rows], positions, records, state, attended[rows], step)
            self._keep(projected[rows], positions, records, state[1])
        z = projected[:, shape.channels : shape.channels + shape.values].view(attended.shape)
        gated = functional.rms_norm(attended, attended.shape[2:], self.head_norm, shape.eps)
        gated = gated * functional.silu(z.float())
        total += functional.linear(gated.flatten(1).bfloat16(), self.out)

    def _keep(self, projected: Tensor, positions: Tensor, records: Tensor, tail: Tensor) -> None:
        """Store the convolution's last inputs, each in its position's slot; padding goes to the last record."""
        import torch

        if len(records) == 1:
            projected, positions = projected[-self.shape.taps :], positions[-self.shape.taps :]
        at = torch.where(records < 0, len(tail) - 1, records.long())
        slots = at * self.shape.taps + positions % self.shape.taps
        tail.view(-1, self.shape.channels)[slots] = projected[:, : self.shape.channels]

    def _recur(
        self,
        projected: Tensor,
        positions: Tensor,
        records: Tensor,
        state: DeviceState,
        out: Tensor,
        step: DeviceStep,
    ) -> None:
        """Compute `out` for equally many tokens of each sequence."""
        native, shape, (slabs, tail) = step.kernels.native, self.shape, state
        if native is None:
            length = len(out) // len(records)
            for s, record in enumerate(records.tolist()):
                rows = slice(s * length, (s + 1) * length)
                begin = int(positions[rows][0])
                out[rows] = 0.0
                if record >= 0:
                    out[rows] = self._recurred(projected[rows], begin, slabs[record], tail[record])
            return
        from twofold import _cuda

        kept = _cuda.DeltaRecords(
            slabs=slabs.data_ptr(), tail=tail.data_ptr(), num_k_heads=shape.num_k_heads,
            num_v_heads=shape.num_v_heads, key_dim=shape.key_dim, value_dim=shape.value_dim, taps=shape.taps,
        )  # fmt: skip
        given = _cuda.DeltaRows(
            projected=projected.data_ptr(), stride=projected.stride(0), conv=self.conv.data_ptr(),
            decay_rate=self.decay_rate.data_ptr(), decay_bias=self.decay_bias.data_ptr(),
            positions=positions.data_ptr(), records=records.data_ptr(), num_sequences=len(records),
            num_tokens=len(out) // len(records),
        )  # fmt: skip
        _cuda.delta(given, kept, out.data_ptr(), native.stream())

    def _recurred(self, projected: Tensor, begin: int, slab: Tensor, tail: Tensor) -> Tensor:
        """Output [tokens, value heads, value_dim] of one sequence whose first token is at `begin`; updates `slab`."""
        import torch
        from torch.nn import functional

        shape, count = self.shape, len(projected)
        size, width, of_key = shape.key_dim, shape.value_dim, shape.num_v_heads // shape.num_k_heads
        rows = projected.float()
        before = [tail[p % shape.taps].float() for p in range(max(0, begin - shape.taps + 1), begin)]
        inputs = torch.stack([*before, *rows[:, : shape.channels]])
        inputs = functional.pad(inputs, (0, 0, shape.taps - 1 - len(before), 0))
        mixed = functional.conv1d(inputs.T[None], self.conv[:, None], groups=shape.channels)[0].T
        parts = functional.silu(mixed).tensor_split((shape.keys, 2 * shape.keys), 1)
        q, k, v = (part.reshape(count, -1, dim) for part, dim in zip(parts, (size, size, width), strict=True))
        q, k = (x * torch.rsqrt((x * x).sum(2, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (q / size**0.5).repeat_interleave(of_key, 1), k.repeat_interleave(of_key, 1)
        b, a = rows[:, shape.channels + shape.values :].chunk(2, 1)
        decay, beta = torch.exp(self.decay_rate * functional.softplus(a + self.decay_bias)), b.sigmoid()

        columns, blocks = BLOCK_COLUMNS, slab.shape[1]
        ends = (size * columns, size * (columns + 1), (size + 1) * (columns + 1) - 1)
        states, keys, deltas, last = torch.tensor_split(slab, ends, 2)
        held, decays, position = (
            states.view(-1, blocks, size, columns), last[..., :1], last[..., 1:2].view(torch.int32)
        )  # fmt: skip
        carried = torch.zeros_like(held) if begin == 0 else held.clone()
        if begin > 0 and int(position.flatten()[0]) == begin - 1:
            carried = decays[..., None] * carried + keys[..., None] * deltas[:, :, None]
        padded = functional.pad(v, (0, blocks * columns - width)).view(count, -1, blocks, columns)
        out = []
        for t in range(count):
            key, decayed = k[t][:, None, :, None], decay[t][:, None, None, None] * carried
            held.copy_(carried)
            delta = beta[t][:, None, None] * (padded[t] - (key * decayed).sum(2))
            carried = decayed + key * delta[:, :, None]
            out.append((q[t][:, None, :, None] * carried).sum(2).flatten(1)[:, :width])
            keys.copy_(k[t][:, None].expand_as(keys))
            deltas.copy_(delta)
            decays.copy_(decay[t][:, None, None].expand_as(decays))
        position.fill_(begin + count - 1)
        return torch.stack(out)
