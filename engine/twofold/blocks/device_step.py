"""What a block's device operator works with: its weights there, the batch, and kernels that torch has no primitive for.

The residual stream is f32 as on the CPU, matrices and what they multiply are bf16. A decode step (one token per
sequence) is free of host synchronisation, so that a graph can hold it. `twofold.device` implements the protocols; torch
is imported only where a device is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from twofold.blocks.block import BlockWeights
from twofold.blocks.router import Router
from twofold.weights.weight_format import Activation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Norms = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""Of q, of k and of v."""
DeviceState = tuple["Tensor", ...]
"""What one block keeps of all sequences."""
Allocate = Callable[..., "Tensor"]
"""Zeros of a shape on the device, bf16, or f32 where `exact` is asked for."""


@dataclass(frozen=True)
class DeviceBatch:
    """A flattened batch on the device."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], in the token's own sequence."""
    slot_mapping: Tensor
    """int64 [T]: page * page_size + position within it; negative: a row of padding."""
    page_tables: Tensor
    """int32 [S, max_pages]."""
    seq_lens: Tensor
    """int32 [S], after this step; 0: a sequence of padding."""
    query_lens: tuple[int, ...] | None = None
    """Tokens of each sequence in this batch, in order; None: one each, a decode step."""
    host_seq_lens: tuple[int, ...] = ()
    """`seq_lens` on the host, where query_lens are given."""
    records: Tensor | None = None
    """int32 [S], of each sequence's record, which only some models' layers look at; negative: padding."""

    def sequences(self) -> tuple[int, list[tuple[int, slice]]]:
        """How many leading sequences have one token each, and (number, rows) of each of the others."""
        counts = self.query_lens or (1,) * len(self.token_ids)
        begin = num_decode = next((s for s, count in enumerate(counts) if count > 1), len(counts))
        others = []
        for s in range(num_decode, len(counts)):
            others.append((s, slice(begin, begin + counts[s])))
            begin += counts[s]
        return num_decode, others

    def by_record(self) -> list[tuple[Tensor, slice]]:
        """(records, rows) of the leading sequences that have one token each, and of each of the others alone."""
        assert self.records is not None
        num_decode, others = self.sequences()
        leading = [(self.records[:num_decode], slice(0, num_decode))] if num_decode > 0 else []
        return [*leading, *((self.records[s : s + 1], rows) for s, rows in others)]


@dataclass(frozen=True)
class KvLayer:
    """One layer's keys and values: bf16 [pages, page_size, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class HeadShape:
    """Heads of one attention layer, and what happens to queries and keys before they meet."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    """Positions that are attended to at most; 0: all."""
    epsilon: float
    chunk: int = 0
    """Positions are attended to within chunks of so many; 0: there are none."""


@dataclass(frozen=True)
class Favour:
    """Experts in slots, where routers favour these: `ops/router.h` says how (CachePrior)."""

    prior: float
    """Above 0, below 1."""
    experts: Tensor
    """bool [T, experts]."""


class NativeKernels(Protocol):
    """What a block needs to call kernels that it alone has."""

    max_length: int
    """Of the longest sequence, which bounds launches."""

    def stream(self) -> int:
        """The current stream, as native code takes it."""

    def workspace(self, num_bytes: int, device: torch.device) -> Tensor:
        """So many bytes at least, until the next call for one."""


class DeviceKernels(Protocol):
    """Device operations without a fitting primitive in torch. All write into tensors that live as long as a graph."""

    @property
    def native(self) -> NativeKernels | None:
        """None: a block computes in plain torch."""

    def route(
        self, logits: Tensor, router: Router, bias: Tensor | None, favour: Favour | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose and weigh experts as `router` says: (ids int32 [T, top_k] by descending weight, weights f32).

        Args:
            logits: f32 [T, experts].
            bias: f32 [experts], added to the scores for choosing only.
            favour: experts that are favoured where they are chosen.
        """

    def rope_store(
        self,
        qkv: Tensor,
        norms: Norms,
        angles: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        kv: KvLayer,
        shape: HeadShape,
    ) -> Tensor:
        """Normalise q, k and v, rotate q and k of bf16 [T, (heads + 2 kv_heads) * head_dim], store k and v, return q.

        Args:
            norms: f32 [head_dim] of q, of k and of v, or None.
            angles: cosines and sines, f32 [T, rotated pairs]: the elements of a head behind them stay as they are.
            slot_mapping: int64 [T], page * page_size + position in it; negative: not stored.

        Returns:
            bf16 [T, heads, head_dim].
        """

    def decode_attention(
        self,
        q: Tensor,
        page_tables: Tensor,
        seq_lens: Tensor,
        kv: KvLayer,
        shape: HeadShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One query per sequence, bf16 [S, heads, head_dim], over its `seq_lens` positions; zeros where there is none.

        Args:
            page_tables: int32 [S, max_pages].
            seq_lens: int32 [S], this token included.
            sinks: f32 [heads], logits that take part in a head's softmax and have no value.
        """

    def prompt_attention(
        self,
        q: Tensor,
        positions: Tensor,
        pages: Tensor,
        seq_len: int,
        kv: KvLayer,
        shape: HeadShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Queries of one sequence over its first `seq_len` positions.

        Args:
            q: [Q, heads, head_dim].
            positions: int64 [Q], of the queries; each sees itself and what is before it, within the window.
            pages: int32, the sequence's pages in order.
        """


class DeviceMoe(Protocol):
    """Runs the routed experts of one layer, wherever it sees fit."""

    @property
    def look_ahead(self) -> Callable[[Tensor], None] | None:
        """Told before a layer's `forward` what the next layer's router says to `hidden`, f32 [T, experts]; None: it
        does not want to know."""

    def favour(self, moe_layer: int, num_tokens: int) -> Favour | None:
        """What the layer's router is to favour in this step of so many rows; None: nothing."""

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """hidden[t] += sum over k of weights[t, k] * expert ids[t, k] of normed[t].

        Args:
            moe_layer: counts layers with experts only, from 0.
            normed: bf16 [T, hidden].
            ids: int32 [T, top_k]; rows below 0 are padding.
            weights: f32 [T, top_k].
            hidden: f32 [T, hidden], in and out.
        """


@runtime_checkable
class LooksAhead(Protocol):
    """A layer's router, asked before its layer has come."""

    def look(self, hidden: Tensor) -> Tensor:
        """f32 [T, experts] of f32 [T, hidden]."""


@dataclass(frozen=True)
class Routed:
    """What a router says of a layer's tokens, for the blocks after it."""

    normed: Tensor
    """bf16 [T, hidden]."""
    ids: Tensor
    """int32 [T, top_k]; below 0: a row of padding."""
    weights: Tensor
    """f32 [T, top_k]."""


@dataclass
class DeviceStep:
    """What one forward pass shares among its blocks."""

    batch: DeviceBatch
    rotations: Sequence[tuple[Tensor, Tensor]]
    """Cosines and sines of the batch's positions, f32 [T, rotated pairs] each, by `ModelConfig.rotations`."""
    kernels: DeviceKernels
    moe: DeviceMoe
    routers: Sequence[LooksAhead] = ()
    """Of all layers with routed experts, in order."""
    routed: Routed | None = None

    def chosen(self) -> Routed:
        """What the router before this block said."""
        assert self.routed is not None
        return self.routed


class DeviceWeights(Protocol):
    """A block's tensors, copied to the device by what they are to the block."""

    source: BlockWeights

    def matrix(self, *parts: str) -> Tensor:
        """bf16, the parts one above the other."""

    def stack(self, part: str) -> Tensor:
        """bf16 [matrices, rows, columns]."""

    def exact(self, part: str) -> Tensor:
        """A matrix as f32."""

    def vector(self, part: str) -> Tensor | None:
        """f32; None where the block has no such part."""

    def norm(self, part: str = "norm") -> Tensor:
        """f32; a vector that is always there."""

    def bias(self, *parts: str) -> Tensor | None:
        """bf16, the parts one after the other; None where the block has none."""


class DeviceBlock(Protocol):
    """One block of one layer on the device."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """Adds what it makes of `hidden` to `total`, both f32 [T, hidden] and one tensor as a rule.

        `state` is what `Block.device_state` made.
        """


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, f32 -> bf16."""
    from torch.nn import functional

    return functional.rms_norm(hidden, hidden.shape[-1:], weight, eps).bfloat16()


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """What an expert's gate and up come to (kernels/include/twofold/expert.h)."""
    import torch
    from torch.nn import functional

    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@dataclass(frozen=True)
class GatedFfn:
    """down(gated(gate x, up x)) in bf16."""

    gate_up: Tensor
    down: Tensor
    activation: Activation = "silu"

    @classmethod
    def of(cls, weights: DeviceWeights, activation: Activation = "silu") -> GatedFfn:
        parts = ("gate_up",) if "gate_up" in weights.source else ("gate", "up")
        return cls(weights.matrix(*parts), weights.matrix("down"), activation)

    def __call__(self, rows: Tensor) -> Tensor:
        from torch.nn import functional

        gate, up = functional.linear(rows, self.gate_up).chunk(2, -1)
        return functional.linear(gated(self.activation, gate, up), self.down)
