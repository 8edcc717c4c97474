"""The dense part of a model on a device, in torch: embedding, attention over paged keys and values, routing, head.

The residual stream is f32 as on the CPU, matrices and what they multiply are bf16. What torch has no fitting primitive
for is `device_kernels`; where routed experts run is the business of the `DeviceMoe` that is passed in. A decode step
(one token per sequence) is free of host synchronisation, so a graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.block import BlockWeights
from twofold.blocks.gqa import Gqa
from twofold.blocks.rope import RopeTable
from twofold.blocks.router import Router
from twofold.device.kernels import DeviceKernels, HeadShape, KvLayer, attend
from twofold.models.model_files import ModelFiles
from twofold.weights.weight_format import WeightMatrix


class DeviceMoe(Protocol):
    """Runs the routed experts of one layer, wherever it sees fit. `experts/` implements it."""

    def forward(self, moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
        """hidden[t] += sum over k of weights[t, k] * expert ids[t, k] of normed[t].

        Args:
            moe_layer: counts layers with experts only, from 0.
            normed: bf16 [T, hidden].
            ids: int32 [T, top_k]; rows below 0 are padding.
            weights: f32 [T, top_k].
            hidden: f32 [T, hidden], in and out.
        """


@dataclass(frozen=True)
class DeviceBatch:
    """A flattened batch on the device."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], in the token's own sequence."""
    places: Tensor
    """int64 [T]: page * page_size + position within it; negative: a row of padding."""
    page_tables: Tensor
    """int32 [S, max_pages]."""
    lengths: Tensor
    """int32 [S], after this step; 0: a sequence of padding."""
    query_lengths: tuple[int, ...] | None = None
    """Tokens of each sequence in this batch, in order; None: one each, a decode step."""
    host_lengths: tuple[int, ...] = ()
    """`lengths` on the host, where query_lengths are given."""


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    ffn_norm: Tensor
    router: Tensor | None
    """f32 [experts, hidden]: choosing experts is worth the exactness."""
    gate_up: Tensor | None
    down: Tensor | None
    moe_layer: int


class DeviceModel:
    """Dense weights on `device` and the forward pass over them. One step at a time."""

    def __init__(
        self,
        files: ModelFiles,
        team: ops.ThreadTeam,
        device: torch.device,
        kernels: DeviceKernels,
        max_length: int,
    ) -> None:
        """Copy everything but the experts to the device, for sequences of at most `max_length` tokens.

        Raises:
            ModelLoadError: its memory is too small (the message names the flags to lower), or the rotation depends on
                the prompt's length.
        """
        self.config = config = files.config
        if config.rope.kind == "dynamic":
            raise ModelLoadError(
                f"{files.tensors.where}: dynamic RoPE scaling, which depends on the prompt's length, does not run on "
                "a device; use --accelerator none"
            )
        self.device = device
        self._kernels = kernels
        attention = config.blocks_of(Gqa)[0]
        self._shape = HeadShape(
            attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale,
            attention.sliding_window or 0, attention.eps,
        )  # fmt: skip
        self._router = config.blocks_of(Router)[0]
        self._team = team
        try:
            self._embedding = self._matrix(config.embedding.table(files.embedding))
            moe_layers = {layer: index for index, layer in enumerate(config.moe_layers)}
            self._layers = [
                self._layer(layer[0][1], layer[1][1], moe_layers.get(index, -1))
                for index, layer in enumerate(files.layers)
            ]
            self._final_norm = self._vector(files.head.vector("norm"))
            tied = config.head.tied
            self._head = self._embedding if tied else self._matrix(files.head.matrix("vocabulary"))
            positions = np.arange(max_length, dtype=np.int32)
            rope = RopeTable(config.rope, config.rope_dim, config.max_position_embeddings)
            cos, sin = rope.rows(positions, positions)
            self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"the dense weights do not fit into the memory of {device}; free some of it, or lower "
                "--max-total-tokens and --gpu-experts-ratio"
            ) from error

    def kv_layers(self, num_pages: int, page_size: int) -> list[KvLayer]:
        """Empty keys and values of every layer."""
        shape = (num_pages, page_size, self._shape.num_kv_heads, self._shape.head_dim)

        def empty() -> Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

        return [KvLayer(empty(), empty()) for _ in self._layers]

    def forward(self, batch: DeviceBatch, kv: list[KvLayer], moe: DeviceMoe) -> Tensor:
        """Hidden states f32 [T, hidden] after the last layer; keys and values are in `kv` afterwards."""
        hidden = self._embedding[batch.token_ids].float()
        angles = self._cos[batch.positions], self._sin[batch.positions]
        padding = (batch.places < 0)[:, None]
        for layer, pages in zip(self._layers, kv, strict=True):
            self._attend(layer, hidden, batch, angles, pages)
            normed = self._normed(hidden, layer.ffn_norm)
            if layer.router is not None:
                logits = functional.linear(normed.float(), layer.router)
                ids, weights = self._kernels.route(logits, self._router.top_k, self._router.renormalise)
                moe.forward(layer.moe_layer, normed, ids.masked_fill_(padding, -1), weights, hidden)
            elif layer.gate_up is not None and layer.down is not None:
                gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
                hidden += functional.linear(functional.silu(gate) * up, layer.down)
        return hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """f32 [R, vocabulary] of rows of forward's result."""
        return functional.linear(self._normed(hidden_rows, self._final_norm), self._head).float()

    def _attend(
        self,
        layer: _Layer,
        hidden: Tensor,
        batch: DeviceBatch,
        angles: tuple[Tensor, Tensor],
        kv: KvLayer,
    ) -> None:
        qkv = functional.linear(self._normed(hidden, layer.norm), layer.qkv, layer.qkv_bias)
        q = self._kernels.rope_store(qkv, (layer.q_norm, layer.k_norm), angles, batch.places, kv, self._shape)
        seen = self._seen(q, batch, kv)
        hidden += functional.linear(seen.flatten(1), layer.o, layer.o_bias)

    def _seen(self, q: Tensor, batch: DeviceBatch, kv: KvLayer) -> Tensor:
        """What attention gives the batch's queries. Leading sequences of one token each share a launch."""
        counts = batch.query_lengths or (1,) * len(q)
        begin = next((s for s, count in enumerate(counts) if count > 1), len(counts))
        parts = []
        if begin > 0:
            tables, lengths = batch.page_tables[:begin], batch.lengths[:begin]
            parts.append(self._kernels.decode_attention(q[:begin], tables, lengths, kv, self._shape))
        for s in range(begin, len(counts)):
            rows = slice(begin, begin + counts[s])
            positions, length = batch.positions[rows], batch.host_lengths[s]
            parts.append(attend(q[rows], positions, batch.page_tables[s], length, kv, self._shape))
            begin += counts[s]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, self._shape.epsilon).bfloat16()

    def _layer(self, attention: BlockWeights, ffn: BlockWeights, moe_layer: int) -> _Layer:
        def optional(weights: BlockWeights, part: str) -> Tensor | None:
            return self._vector(weights.vector(part)) if part in weights else None

        gate_up = [self._matrix(ffn.matrix(part)) for part in ("gate", "up") if "up" in ffn]
        return _Layer(
            norm=self._vector(attention.vector("norm")),
            qkv=torch.cat([self._matrix(attention.matrix(part)) for part in "qkv"]),
            qkv_bias=self._bias(Gqa.qkv_bias(attention)),
            q_norm=optional(attention, "q_norm"),
            k_norm=optional(attention, "k_norm"),
            o=self._matrix(attention.matrix("o")),
            o_bias=self._bias(attention.optional_vector("o_bias")),
            ffn_norm=self._vector(ffn.vector("norm")),
            router=None if gate_up else self._matrix(ffn.matrix("gate")).float(),
            gate_up=torch.cat(gate_up) if gate_up else None,
            down=self._matrix(ffn.matrix("down")) if gate_up else None,
            moe_layer=moe_layer,
        )

    def _matrix(self, matrix: WeightMatrix) -> Tensor:
        return torch.from_numpy(ops.dequantise(self._team, matrix)).to(self.device, torch.bfloat16)

    def _vector(self, vector: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
        return torch.from_numpy(np.array(vector, np.float32)).to(self.device)

    def _bias(self, vector: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None) -> Tensor | None:
        return None if vector is None else self._vector(vector).bfloat16()
