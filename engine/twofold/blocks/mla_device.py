"""Latent attention on a device: absorbed for every row as on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from twofold._core.device import MlaDecode, MlaPages, MlaRows
from twofold.blocks.attention.chosen import ChosenPositions, position_lists
from twofold.blocks.attention.linear import LinearOnDevice
from twofold.blocks.attention.selection import SelectionOnDevice
from twofold.blocks.device_step import DeviceState, DeviceStep, NativeKernels

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.blocks.attention.gate import Gate
    from twofold.blocks.attention.query_scale import HeadScaleOnDevice, QueryScale
    from twofold.blocks.attention.rotation import Rotation
    from twofold.blocks.attention.scores import Scores
    from twofold.blocks.attention.selection import Selection

_KERNEL_LATENT: Final = 1024
"""Elements of a latent that a device's kernels can have (`kMlaMaxLatent`); longer ones are computed in torch."""


class MlaComposition(Protocol):
    """`blocks.mla.Mla` as its device operator reads it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def qk_head_dim(self) -> int: ...
    @property
    def query_rows(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def gate_rows(self) -> int: ...
    @property
    def kv_layer(self) -> int | None: ...
    @property
    def latent_eps(self) -> float: ...
    @property
    def rotation(self) -> Rotation | None: ...
    @property
    def select(self) -> Selection: ...
    @property
    def scores(self) -> Scores: ...
    @property
    def gate(self) -> Gate | None: ...


@dataclass(frozen=True)
class MlaOnDevice:
    """See `blocks.mla`. Without native kernels, plain torch (the reference)."""

    shape: MlaComposition
    project: LinearOnDevice
    expand: LinearOnDevice | None
    """Queries from their low-rank part; None: they have none."""
    latent_norm: Tensor | None
    """Times `latent_scale`; None: latents are those of an earlier layer."""
    key_norm: Tensor | None
    k_b: Tensor
    """[heads, nope, latent]."""
    v_b: Tensor
    """[heads, latent, value]."""
    select: SelectionOnDevice
    out: LinearOnDevice
    scale: QueryScale | HeadScaleOnDevice | None = None
    sinks: Tensor | None = None
    """f32 [heads]."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch

        shape = self.shape
        a = self.project(hidden)
        end = a.shape[1] - shape.gate_rows
        begin = end if self.latent_norm is None else end - shape.cached
        q, compressed, gates = a[:, :begin], a[:, begin:end], a[:, end:]
        if self.key_norm is not None:
            key = compressed[:, shape.kv_lora_rank :]
            key.copy_(
                torch.nn.functional.rms_norm(key.float(), key.shape[1:], self.key_norm, shape.latent_eps)
            )
        if self.expand is not None:
            q = self.expand(q.float())
        q = q.reshape(len(q), shape.num_heads, shape.query_rows)
        if shape.query_rows > shape.qk_head_dim:
            gates = q[..., shape.qk_head_dim :]
        q = q[..., : shape.qk_head_dim].contiguous()
        absorbed = q.new_empty((len(q), shape.num_heads, shape.cached))
        latents = torch.bmm(q[..., : shape.qk_nope_head_dim].transpose(0, 1), self.k_b)
        absorbed[..., : shape.kv_lora_rank] = latents.transpose(0, 1)
        self._store(compressed, q, absorbed, state[0], step)
        own = state[len(state) - len(shape.select.planes) :]  # after those of the layer with the latents
        chosen = self.select.prepare(hidden, a, own, step)
        if self.scale is not None:
            absorbed *= self.scale.factors(step.batch.positions)[..., None].to(absorbed.dtype)
        values = torch.bmm(self._attended(absorbed, state[0], step, chosen).transpose(0, 1), self.v_b)
        values = values.transpose(0, 1)
        if shape.gate is not None:
            values = shape.gate.apply(values, gates.reshape(*values.shape[:2], -1))
        total += self.out(values.flatten(1))

    def _store(self, compressed: Tensor, q: Tensor, absorbed: Tensor, kept: Tensor, step: DeviceStep) -> None:
        """Write normalised latents and rotated keys to the cache if they are this layer's, and rotated query parts
        after the absorbed queries."""
        import torch

        shape, native, rotation = self.shape, self._native(step), self.shape.rotation
        cos, sin = (None, None) if rotation is None else rotation.angles(step)
        if native is not None and self.latent_norm is not None:
            of_batch = MlaRows(
                compressed=compressed,
                stride=compressed.stride(0),
                queries=q,
                num_tokens=len(q),
                num_heads=shape.num_heads,
                nope=shape.qk_nope_head_dim,
                norm=self.latent_norm,
                epsilon=shape.latent_eps,
                cos=cos,
                sin=sin,
                neighbours=rotation is not None and rotation.neighbours,
                slot_mapping=step.batch.slot_mapping,
            )
            native.device.mla_store(of_batch, self._pages(kept), absorbed=absorbed, stream=native.stream())
            return
        queries = q[..., shape.qk_nope_head_dim :].float()
        if rotation is not None and cos is not None and sin is not None:
            queries = rotation.rotated(queries, cos[:, None], sin[:, None])
        absorbed[..., shape.kv_lora_rank :] = queries.to(absorbed.dtype)
        if self.latent_norm is None:
            return
        latent, key = compressed[:, : shape.kv_lora_rank].float(), compressed[:, shape.kv_lora_rank :].float()
        latent = torch.nn.functional.rms_norm(latent, latent.shape[1:], self.latent_norm, shape.latent_eps)
        if rotation is not None and cos is not None and sin is not None:
            key = rotation.rotated(key, cos, sin)
        rows = torch.cat([latent, key], 1).to(kept.dtype)
        slots = step.batch.slot_mapping
        kept.view(-1, shape.cached)[slots[slots >= 0]] = rows[slots >= 0]

    def _attended(
        self, absorbed: Tensor, kept: Tensor, step: DeviceStep, chosen: ChosenPositions | None
    ) -> Tensor:
        """Weighted latents [T, heads, latent]. Leading sequences of one token each share a launch."""

        batch, native, shape = step.batch, self._native(step), self.shape
        num_decode, others = batch.sequences()
        out = absorbed.new_zeros((*absorbed.shape[:2], shape.kv_lora_rank))
        if native is not None and num_decode > 0:
            tables = batch.page_tables[:num_decode]
            max_length = min(native.max_length, tables.shape[1] * kept.shape[1])
            num_bytes = native.device.mla_workspace_bytes(
                num_sequences=num_decode,
                num_heads=shape.num_heads,
                latent=shape.kv_lora_rank,
                max_length=max_length,
            )
            decode = MlaDecode(
                absorbed=absorbed,
                page_tables=tables,
                seq_lens=batch.seq_lens,
                num_sequences=num_decode,
                num_heads=shape.num_heads,
                max_pages=tables.shape[1],
                max_length=max_length,
                rule=shape.scores.native,
                select=shape.select.native,
                sinks=self.sinks,
                chosen=position_lists(chosen),
            )
            workspace, pages = native.workspace(num_bytes, absorbed.device), self._pages(kept)
            native.device.mla_decode(decode, pages, workspace=workspace, out=out, stream=native.stream())
        elif num_decode > 0:
            lengths = batch.seq_lens[:num_decode].tolist()
            others = [*((s, slice(s, s + 1)) for s, length in enumerate(lengths) if length > 0), *others]
        for s, rows in others:
            length = int(batch.seq_lens[s]) if s < num_decode else batch.host_seq_lens[s]
            used = batch.page_tables[s, : -(-length // kept.shape[1])].long()
            latents = kept[used].flatten(0, 1)[:length].to(absorbed.dtype)[:, None]
            seen = shape.select.seen(batch.positions[rows], length, batch.ends_of(rows))
            if chosen is not None:
                seen = chosen.of(rows).within(seen, shape.num_heads)
            values = latents[..., : shape.kv_lora_rank]
            out[rows] = shape.scores.attended(absorbed[rows], latents, values, seen, sinks=self.sinks)
        return out

    def _native(self, step: DeviceStep) -> NativeKernels | None:
        return step.kernels.native if self.shape.kv_lora_rank <= _KERNEL_LATENT else None

    def _pages(self, kept: Tensor) -> MlaPages:
        shape = self.shape
        return MlaPages(
            rows=kept, page_size=kept.shape[1], latent=shape.kv_lora_rank, rope=shape.qk_rope_head_dim
        )
