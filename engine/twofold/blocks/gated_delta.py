"""Gated delta net (Yang, Kautz, Hatamizadeh, arXiv 2412.06464) as in Qwen3-Next and Qwen3.5, with its own norm.

Its state is a matrix per head, independent of the sequence's length, and the last inputs of a short convolution; there
are no keys and values. Reference: transformers `models/qwen3_next`, `torch_recurrent_gated_delta_rule`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import numpy.typing as npt

from twofold._core.device import DeltaRecords, DeltaRows
from twofold.blocks import ops
from twofold.blocks.attention.gate import SILU_OF_Z, Gate
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.attention.linear import Linear, LinearOnDevice
from twofold.blocks.attention.norms import norm_part
from twofold.blocks.block import BlockPart, ComposedBlock, Cost, Record
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.blocks.device_tails import keep_inputs
from twofold.weights.tensor_spec import HasTensor

if TYPE_CHECKING:
    from torch import Tensor

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GatedDelta(ComposedBlock):
    kind: ClassVar[str] = "attention"

    hidden_size: int
    num_k_heads: int
    num_v_heads: int
    key_dim: int
    """Elements per key head."""
    value_dim: int
    """Elements per value head."""
    taps: int
    """Taps of the convolution."""
    eps: float
    zero_centred: bool = False
    """Whether checkpoints store the layer's norm minus 1."""
    log_decay: bool = True
    """Whether checkpoints store the logarithm of the decay rate; else the negative rate."""
    gate: Gate = SILU_OF_Z
    """Gate of the outputs, after their norm."""
    normed: bool = True
    """Whether the input is normed."""
    tiled: bool = False
    """Whether value head h uses key head h % num_k_heads, as in GGUF files of Qwen3.5; else value heads of a key head
    are adjacent."""

    @property
    def keys(self) -> int:
        return self.num_k_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_v_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, all keys, all values."""
        return 2 * self.keys + self.values

    def problems(self) -> Iterator[str]:
        if self.num_v_heads % self.num_k_heads:
            yield (
                f"linear_num_value_heads {self.num_v_heads} is not a multiple of linear_num_key_heads "
                f"{self.num_k_heads}"
            )
        if self.taps < 2:
            yield f"linear_conv_kernel_dim is {self.taps}, at least 2 were expected"

    def parts(self, found: HasTensor) -> tuple[BlockPart, ...]:
        names = LayerNames(self.layer, "linear_attn", zero_centred=self.zero_centred)
        hidden, heads, values = self.hidden_size, self.num_v_heads, self.values
        project = {"norm": names.input_norm(hidden)} if self.normed else {}
        together = names.matrix("in_proj_qkvz", "ssm_in", self.channels + values, hidden)
        gates = names.matrix("in_proj_ba", "ssm_ba", 2 * heads, hidden, role="exact")
        if found(together):
            project["qkvz"] = together
        else:
            project["qkv"] = names.matrix("in_proj_qkv", "attn_qkv", self.channels, hidden)
            project["z"] = names.matrix("in_proj_z", "attn_gate", values, hidden)
        if found(gates):
            project["ba"] = gates
        else:
            project["b"] = names.matrix("in_proj_b", "ssm_beta", heads, hidden, role="exact")
            project["a"] = names.matrix("in_proj_a", "ssm_alpha", heads, hidden, role="exact")
        conv = names.exact("conv1d.weight", "ssm_conv1d.weight", self.channels, 1, self.taps)
        decay = {
            "decay": names.exact("A_log", "ssm_a", heads),
            "decay_bias": names.exact("dt_bias", "ssm_dt.bias", heads),
        }
        return (
            BlockPart("project", project),
            BlockPart("convolve", {"conv": conv}),
            BlockPart("recur", decay),
            BlockPart("norm", {"head_norm": names.exact("norm.weight", "ssm_norm.weight", self.value_dim)}),
            BlockPart("gate", settings=self.gate),
            BlockPart("out", {"out": names.matrix("out_proj", "ssm_out", hidden, values)}),
        )

    @property
    def state(self) -> tuple[Record]:
        num_bytes = ops.GatedDelta.record_bytes(
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            taps=self.taps,
        )
        return (Record(num_bytes),)

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes; the convolution's weights are float32."""
        others = sum(weights.packed_bytes(part) for part in weights.specs if part != "conv")
        return others + 4 * self.channels * self.taps

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        """Cost; the state is read and written once and otherwise stays in registers or a cache."""
        base = super().cost(weights, tokens, context_len)
        of_state = 7.0 * self.values * self.key_dim  # per token: decay, two products, one outer product
        return Cost(base.num_bytes + 2 * self.state[0].num_bytes, base.flops + tokens * of_state)

    def project(self, weights: BlockWeights) -> Linear:
        """Product with hidden states, its parts in the operator's order."""
        parts = (part for part in ("qkvz", "qkv", "z", "ba", "b", "a") if part in weights)
        return Linear(tuple(parts), "norm", self.eps)

    def decay_rate(self, weights: BlockWeights) -> F32:
        """Negative decay rate [num_v_heads]: the state is multiplied by exp(rate * softplus(a + bias))."""
        kept = weights.vector("decay")
        return -np.exp(kept) if self.log_decay else kept

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        where = f"layer {self.layer}, gated delta net"
        return ops.GatedDelta(
            pool,
            project=self.project(weights).cpu(weights, pool, where),
            conv=np.ascontiguousarray(weights.vector("conv")[:, 0].T),
            decay_rate=self.decay_rate(weights),
            decay_bias=weights.vector("decay_bias"),
            head_norm=norm_part(weights.vector("head_norm"), self.eps),
            gate={"activation": self.gate.activation},
            out=Linear(("out",)).cpu(weights, pool, where),
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            tiled=self.tiled,
            grouped="qkvz" in weights,
            grouped_gates="ba" in weights,
            layer=self.layer,
            record_at=self.record_at,
        )

    @property
    def device_elements_per_token(self) -> int:
        return self.channels + 4 * self.values

    def device_bytes(self, weights: BlockWeights) -> int:
        """Device bytes; the gates of the state are bf16 there."""
        gates = sum(math.prod(weights.specs[part].shape) for part in ("ba", "b", "a") if part in weights)
        return super().device_bytes(weights) - 2 * gates

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        """Device operator; rows are ordered queries, keys, values, z, b, a, with values of a key head adjacent."""
        import torch

        source = weights.source
        rows, heads, values = self._order(grouped="qkvz" in source, grouped_gates="ba" in source)
        project, out = self.project(source).device(weights), weights.matrix("out")
        device = project.weight.device
        channels = np.concatenate([np.arange(2 * self.keys), 2 * self.keys + values])

        def exact(array: F32) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return GatedDeltaOnDevice(
            self,
            project=replace(project, weight=weights.reordered(project.weight, rows=rows)),
            conv=exact(source.vector("conv")[channels, 0]),
            decay_rate=exact(self.decay_rate(source)[heads]),
            decay_bias=exact(source.vector("decay_bias")[heads]),
            head_norm=weights.norm("head_norm"),
            out=LinearOnDevice(weights.reordered(out, columns=values)),
        )

    def _order(self, *, grouped: bool, grouped_gates: bool) -> tuple[I64, I64, I64]:
        """Checkpoint row numbers of the device's projection rows, value heads and values."""
        k_heads, of_key = self.num_k_heads, self.num_v_heads // self.num_k_heads
        key, value = self.key_dim, self.value_dim
        heads = np.arange(self.num_v_heads)
        if self.tiled:
            heads = heads.reshape(of_key, k_heads).T.reshape(-1)
        values = (heads[:, None] * value + np.arange(value)).reshape(-1)
        first, v = self.channels + self.values, 2 * self.keys + values
        main = [np.arange(2 * self.keys), v, v + self.values]
        gates = [first + heads, first + self.num_v_heads + heads]
        if grouped:
            groups = np.arange(first).reshape(k_heads, -1)
            main = [part.reshape(-1) for part in np.split(groups, np.cumsum([key, key, of_key * value]), 1)]
        if grouped_gates:
            pairs = np.arange(2 * self.num_v_heads).reshape(k_heads, 2, of_key)
            gates = [first + pairs.swapaxes(0, 1).reshape(-1)]
        return np.concatenate([*main, *gates]), heads, values

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        """Slabs (`slab_shape`) and the convolution's inputs; the inputs have one record more, which padding writes
        to."""
        slabs = (num_records, *slab_shape(self))
        return allocate(slabs, exact=True), allocate((num_records + 1, self.taps, self.channels))

    @property
    def device_record_bytes(self) -> int:
        return 4 * math.prod(slab_shape(self)) + 2 * self.taps * self.channels


BLOCK_COLUMNS: Final = 32
"""Columns per block of a head's state, in a slab on a device."""


def slab_shape(shape: GatedDelta) -> tuple[int, int, int]:
    """Shape of one record on a device: (value heads, blocks of columns, floats). Each block holds the state before its
    last token, then that token's key, delta, decay and position (int32), see `kernels/device/delta_layer.h`."""
    floats = shape.key_dim * (BLOCK_COLUMNS + 1) + BLOCK_COLUMNS + 2
    return shape.num_v_heads, -(-shape.value_dim // BLOCK_COLUMNS), -(-floats // 4) * 4


@dataclass(frozen=True)
class GatedDeltaOnDevice:
    """Device operator of a gated delta net. Without native kernels, plain torch (the reference).

    The per-sequence state tolerates a token computed twice after a lost step: it holds the state before the last token
    and that token's update separately; the convolution's inputs lie in slots by position.
    """

    shape: GatedDelta
    project: LinearOnDevice
    """Rows of all queries, all keys, all values (the channels), then z, b, a."""
    conv: Tensor
    """f32 [channels, taps]."""
    decay_rate: Tensor
    decay_bias: Tensor
    head_norm: Tensor
    out: LinearOnDevice

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        import torch
        from torch.nn import functional

        shape, batch = self.shape, step.batch
        projected = self.project(hidden)
        attended = torch.empty(
            (len(hidden), shape.num_v_heads, shape.value_dim), dtype=torch.float32, device=hidden.device
        )
        for records, rows in batch.by_record():
            positions = batch.positions[rows]
            chain = batch.chain_of(rows)
            self._recur(projected[rows], positions, records, state, attended[rows], step, chain)
            keep_inputs(projected[rows, : shape.channels], positions, records, chain, state[1])
        z = projected[:, shape.channels : shape.channels + shape.values].view(attended.shape)
        gated = functional.rms_norm(attended, attended.shape[2:], self.head_norm, shape.eps)
        total += self.out(shape.gate.apply(gated, z.float()).flatten(1))

    def _recur(
        self,
        projected: Tensor,
        positions: Tensor,
        records: Tensor,
        state: DeviceState,
        out: Tensor,
        step: DeviceStep,
        chain: Tensor | None,
    ) -> None:
        """Compute `out` for equally many tokens of each sequence."""
        native, shape, (slabs, tail) = step.kernels.native, self.shape, state
        if native is None and chain is not None:
            self._recur_chained(projected, positions, records, state, out, chain.tolist())
            return
        if native is None:
            length = len(out) // len(records)
            for s, record in enumerate(records.tolist()):
                rows = slice(s * length, (s + 1) * length)
                begin = int(positions[rows][0])
                out[rows] = 0.0
                if record >= 0:
                    out[rows] = self._recurred(projected[rows], begin, slabs[record], tail[record])
            return
        kept = DeltaRecords(
            slabs=slabs,
            tail=tail,
            num_k_heads=shape.num_k_heads,
            num_v_heads=shape.num_v_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            taps=shape.taps,
        )
        given = DeltaRows(
            projected=projected,
            stride=projected.stride(0),
            conv=self.conv,
            decay_rate=self.decay_rate,
            decay_bias=self.decay_bias,
            positions=positions,
            records=records,
            num_sequences=len(records),
            num_tokens=len(out) // len(records),
            chain=chain,
        )
        native.device.delta(given, kept, out=out, stream=native.stream())

    def _recur_chained(
        self,
        projected: Tensor,
        positions: Tensor,
        records: Tensor,
        state: DeviceState,
        out: Tensor,
        chain: list[int],
    ) -> None:
        """Compute `out` for rows of one token, each from its sequence's first record (`DeviceBatch.chain`)."""
        slabs, tail = state
        out.zero_()
        numbers = records.tolist()
        for row in reversed(
            range(len(chain))
        ):  # a sequence's first row overwrites what the others begin from
            first = row - chain[row]
            if numbers[first] < 0:
                continue
            slab = slabs[numbers[first]].clone()
            rows = slice(first, row + 1)
            out[row] = self._recurred(projected[rows], int(positions[first]), slab, tail[numbers[first]])[-1]
            slabs[numbers[row]] = slab

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
        held, decays = states.view(-1, blocks, size, columns), last[..., :1]
        position = last[..., 1:2].view(torch.int32)
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
