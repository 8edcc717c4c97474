"""Interfaces of a block's device operator: device weights, the batch, and kernels for which torch has no primitive.

The residual stream is f32 as on the CPU; matrices and their inputs are bf16. A decode step (one token per sequence)
does no host synchronisation, so that a graph can capture it. `twofold.device` implements the protocols; torch is
imported only where a device is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from twofold.api.media import MediaPart
from twofold.blocks import ops
from twofold.blocks.block_weights import BlockWeights
from twofold.weights.weight_format import Activation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from twofold._core import Stretch
    from twofold._core import device as launches
    from twofold.blocks.attention.chosen import ChosenPositions
    from twofold.blocks.attention.scores import Scores

Norms = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
"""Norm weights of q, k and v."""
I64 = npt.NDArray[np.int64]
DeviceState = tuple["Tensor", ...]
"""State that one block keeps of all sequences."""
Allocate = Callable[..., "Tensor"]
"""Allocates zeros of a shape on the device: bf16, or f32 if `exact` is set."""


@dataclass(frozen=True)
class DeviceBatch:
    """A flattened batch on the device."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], positions within each token's own sequence."""
    slot_mapping: Tensor
    """int64 [T]: page * page_size + position within the page; negative: a padding row."""
    page_tables: Tensor
    """int32 [S, max_pages]."""
    seq_lens: Tensor
    """int32 [S], lengths after this step; 0: a padding sequence."""
    query_lens: tuple[int, ...] | None = None
    """Tokens of each sequence in this batch, in order; None: one each (a decode step)."""
    host_seq_lens: tuple[int, ...] = ()
    """`seq_lens` on the host, if query_lens are given."""
    records: Tensor | None = None
    """int32 [S], each sequence's record index, used only by models with records; negative: padding."""
    chain: Tensor | None = None
    """int32 [S] where drafts are verified and layers keep records: how many of the rows directly before belong to the
    same sequence, one row each. Its first row begins from its own record; each row's state goes to the row's record.
    None: no sequence has several rows of one token."""
    adapters: Tensor | None = None
    """int32 [T] number of each row's adapter, -1: none; None: no row uses one."""
    rotations: Tensor | None = None
    """int64 [T] or, where pictures have several, [axes, T]: positions in rotary embedding; None: `positions`."""
    media: tuple[MediaPart, ...] = ()
    """Pictures' rows among the tokens."""
    pictures: Tensor | None = None
    """bool [T]: whether a token has experts of pictures; None: no token has."""
    ends: Tensor | None = None
    """int64 [T]: position after the last one that a token attends to where tokens of a picture attend to one another;
    None: each attends to none after its own."""
    layer_inputs: Tensor | None = None
    """f32 [T, width], see `blocks.table_inputs`."""

    def sequences(self) -> tuple[int, list[tuple[int, slice]]]:
        """Number of leading sequences with one token each, and (index, rows) of each other sequence."""
        counts = self.query_lens or (1,) * len(self.token_ids)
        begin = num_decode = next((s for s, count in enumerate(counts) if count > 1), len(counts))
        others = []
        for s in range(num_decode, len(counts)):
            others.append((s, slice(begin, begin + counts[s])))
            begin += counts[s]
        return num_decode, others

    def sequence_of_rows(self) -> Tensor | None:
        """int32 [T], the index of each row's sequence; None: every sequence has one row."""
        import torch

        if self.query_lens is None or max(self.query_lens) == 1:
            return None
        numbers = np.repeat(np.arange(len(self.query_lens), dtype=np.int32), self.query_lens)
        return torch.from_numpy(numbers).to(self.positions.device)

    def chain_of(self, rows: slice) -> Tensor | None:
        """`chain` of rows that `by_record` returned; None where each of its sequences has one record."""
        num_decode = self.sequences()[0]
        return None if self.chain is None or rows.stop > num_decode else self.chain[rows]

    def ends_of(self, rows: slice) -> Tensor | None:
        return None if self.ends is None else self.ends[rows]

    def by_record(self) -> list[tuple[Tensor, slice]]:
        """(records, rows): first all leading sequences with one token each, then each other sequence separately."""
        assert self.records is not None
        num_decode, others = self.sequences()
        leading = [(self.records[:num_decode], slice(0, num_decode))] if num_decode > 0 else []
        return [*leading, *((self.records[s : s + 1], rows) for s, rows in others)]


@dataclass(frozen=True)
class KvLayer:
    """One layer's keys and values: bf16 [pages, page_size, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor


class AttendedStretch(Protocol):
    """Stretch of positions that a query attends to, as `blocks.attention.selection.Selection` has it."""

    def seen(self, positions: Tensor, length: int, ends: Tensor | None = None) -> Tensor:
        """bool [Q, length]: which of a sequence's first `length` positions queries at `positions` [Q] attend to.

        ends: [Q] see `DeviceBatch.ends`.
        """

    @property
    def native(self) -> Stretch: ...


@dataclass(frozen=True)
class HeadShape:
    """Head layout of one attention layer, and the transforms of queries and keys before the dot product."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    select: AttendedStretch
    scores: Scores
    """With a scale."""


@dataclass(frozen=True)
class CachePrior:
    """Routing bias towards experts in slots (see `ops/router.h`)."""

    strength: float
    """Above 0 and below 1."""
    experts: Tensor
    """bool [T, experts]."""


class RoutingRule(Protocol):
    """How logits become experts and weights: fields of `blocks.router.Router`."""

    @property
    def shape(self) -> ops.RouterShape: ...
    @property
    def top_k(self) -> int: ...
    @property
    def score(self) -> str: ...
    @property
    def renormalise(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_score(self) -> str: ...
    @property
    def zero_others(self) -> bool: ...


class BlockLaunches(Protocol):
    """Launches of blocks' own kernels by a native device. Arguments are documented in kernels/device; each launch
    raises KernelError if the device refuses it."""

    def mla_store(
        self, rows: launches.MlaRows, pages: launches.MlaPages, *, absorbed: Tensor, stream: int
    ) -> None: ...
    def mla_decode(
        self,
        decode: launches.MlaDecode,
        pages: launches.MlaPages,
        *,
        workspace: Tensor,
        out: Tensor,
        stream: int,
    ) -> None: ...
    def mla_workspace_bytes(
        self, *, num_sequences: int, num_heads: int, latent: int, max_length: int
    ) -> int: ...
    def index_store(
        self, rows: launches.IndexRows, pages: launches.IndexPages, *, rotated: Tensor, stream: int
    ) -> None: ...
    def index_pool(self, pools: launches.IndexPools, pages: launches.IndexPages, *, stream: int) -> None: ...
    def index_choose(
        self, choice: launches.IndexChoice, pages: launches.IndexPages, *, scores: Tensor, stream: int
    ) -> None: ...
    def delta(
        self, rows: launches.DeltaRows, records: launches.DeltaRecords, *, out: Tensor, stream: int
    ) -> None: ...


class NativeKernels(Protocol):
    """Arguments of a block's own native kernels."""

    max_length: int
    """Length of the longest sequence, which bounds launches."""

    @property
    def device(self) -> BlockLaunches: ...

    def stream(self) -> int:
        """The current stream's handle for native code."""

    def workspace(self, num_bytes: int, device: torch.device) -> Tensor:
        """Scratch memory of at least `num_bytes`, valid until the next call."""


class DeviceKernels(Protocol):
    """Device operations without a fitting primitive in torch. All write into tensors that live as long as a graph."""

    @property
    def native(self) -> NativeKernels | None:
        """Native kernels; None: blocks compute in plain torch."""

    def route(
        self, logits: Tensor, router: RoutingRule, bias: Tensor | None, prior: CachePrior | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose and weight experts as `router` specifies: (ids int32 [T, top_k] by descending weight, weights f32).

        Args:
            logits: f32 [T, experts].
            bias: f32 [experts], added to the scores for choosing only.
            prior: experts in slots whose scores are raised for choosing.
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
            angles: cosines and sines, f32 [T, rotated pairs]; elements of a head after the rotated ones stay unchanged.
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
        chosen: ChosenPositions | None = None,
    ) -> Tensor:
        """Attention of one query per sequence, bf16 [S, heads, head_dim], over `seq_lens` positions; zeros if 0.

        Args:
            page_tables: int32 [S, max_pages].
            seq_lens: int32 [S], this token included.
            sinks: f32 [heads], logits that take part in a head's softmax and have no value.
            chosen: lists of the queries' positions; None: each attends to all of its stretch.
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
        chosen: ChosenPositions | None = None,
        *,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Attention of several queries of one sequence over its first `seq_len` positions.

        Args:
            q: [Q, heads, head_dim].
            positions: int64 [Q], of the queries; each attends to itself and earlier positions, as selected.
            ends: int64 [Q] see `DeviceBatch.ends`.
            pages: int32, the sequence's pages in order.
        """


class DeviceMoe(Protocol):
    """Runs the routed experts of one layer, on any processor."""

    @property
    def look_ahead(self) -> Callable[[Tensor], None] | None:
        """Callback that receives the next layer's router logits for `hidden`, f32 [T, experts], before a layer's
        `forward`; None: no prediction is wanted."""

    def cache_prior(self, moe_layer: int, num_tokens: int) -> CachePrior | None:
        """Routing bias of the layer for this step of `num_tokens` rows; None: none."""

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """Routed experts: hidden[t] += sum over k of weights[t, k] * expert ids[t, k] of normed[t].

        Args:
            moe_layer: index among layers with experts, from 0.
            normed: bf16 [T, hidden].
            ids: int32 [T, top_k]; rows below 0 are padding.
            weights: f32 [T, top_k].
            hidden: f32 [T, hidden], in and out.
        """


@runtime_checkable
class LookAheadRouter(Protocol):
    """A router that can be evaluated before its layer is reached."""

    def look(self, hidden: Tensor) -> Tensor:
        """Router logits f32 [T, experts] for f32 [T, hidden]."""


@dataclass(frozen=True)
class Routed:
    """A router's output for a layer's tokens, read by the blocks after it."""

    normed: Tensor
    """bf16 [T, hidden]."""
    ids: Tensor
    """int32 [T, top_k]; below 0: a padding row."""
    weights: Tensor
    """f32 [T, top_k]."""


@dataclass
class DeviceStep:
    """Data that the blocks of one forward pass share."""

    batch: DeviceBatch
    rotations: Sequence[tuple[Tensor, Tensor]]
    """Cosines and sines of the batch's positions, f32 [T, rotated pairs] each, by `ModelConfig.rotations`."""
    kernels: DeviceKernels
    moe: DeviceMoe
    routers: Sequence[LookAheadRouter] = ()
    """Routers of all layers with routed experts, in order."""
    routed: Routed | None = None
    previous: Tensor | None = None
    """f32 [T, hidden], normed hidden states that an MTP layer reads."""
    chosen_positions: ChosenPositions | None = None
    """Positions that the last chooser of the step chose (`blocks.attention.selection.Chosen`)."""
    stream_weights: Tensor | None = None
    """f32 [T, streams], by which the streams get the output of the current part (`blocks.hyper_connection`)."""
    stream_matrix: Tensor | None = None
    """f32 [T, streams, streams], by which the streams become mixtures of all of them before that, if they do."""

    def chosen(self) -> Routed:
        """Output of the router before this block."""
        assert self.routed is not None
        return self.routed


class DeviceWeights(Protocol):
    """A block's tensors on the device, keyed by their role in the block."""

    source: BlockWeights

    def matrix(self, *parts: str) -> Tensor:
        """Weights in bf16, the parts stacked row-wise."""

    def reordered(self, matrix: Tensor, *, rows: I64 | None = None, columns: I64 | None = None) -> Tensor:
        """A result of `matrix` with its rows, or its columns, in this order."""

    def by_head(self, matrix: Tensor, rows: I64, *, is_transposed: bool = False) -> Tensor:
        """Rows [heads, rows of a head] of a result of `matrix`, as [heads, rows, columns], or transposed within each
        head."""

    def stack(self, part: str) -> Tensor:
        """Stacked matrices, bf16 [matrices, rows, columns]."""

    def exact(self, part: str) -> Tensor:
        """A matrix as f32."""

    def vector(self, part: str) -> Tensor | None:
        """A vector as f32; None if the block has no such part."""

    def norm(self, part: str = "norm") -> Tensor:
        """A vector as f32 that always exists."""

    def bias(self, *parts: str) -> Tensor | None:
        """Concatenated biases in bf16; None if the block has none."""


class DeviceBlock(Protocol):
    """One block of one layer on the device."""

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        """Add the block's output for `hidden` to `total`; both f32 [T, hidden], usually the same tensor.

        `state` is the result of `Block.device_state`.
        """


def normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, f32 -> bf16."""
    from torch.nn import functional

    return functional.rms_norm(hidden, hidden.shape[-1:], weight, eps).bfloat16()


def gated(activation: Activation, gate: Tensor, up: Tensor, limit: float = 0.0) -> Tensor:
    """Activation of gate times up (kernels/include/twofold/expert.h)."""
    import torch
    from torch.nn import functional

    most = limit or torch.inf
    up = up.clamp(-most, most)
    if activation == "swiglu_oai":
        gate = gate.clamp(max=most)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation == "silu_of_limited":
        return functional.silu(gate.clamp(max=most)) * up
    silu = activation == "silu"
    activated = functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")
    return activated.clamp(max=most) * up


@dataclass(frozen=True)
class GatedFfn:
    """Gated feed-forward layer in bf16: down(gated(gate x, up x))."""

    gate_up: Tensor
    down: Tensor
    activation: Activation = "silu"
    limit: float = 0.0
    """Bound of gate and up; 0: none."""

    @classmethod
    def of(cls, weights: DeviceWeights, activation: Activation = "silu", limit: float = 0.0) -> GatedFfn:
        parts = ("gate_up",) if "gate_up" in weights.source else ("gate", "up")
        return cls(weights.matrix(*parts), weights.matrix("down"), activation, limit)

    def __call__(self, rows: Tensor) -> Tensor:
        from torch.nn import functional

        gate, up = functional.linear(rows, self.gate_up).chunk(2, -1)
        return functional.linear(gated(self.activation, gate, up, self.limit), self.down)
