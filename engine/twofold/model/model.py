"""A loaded model: from token ids to logits, on the native operators.

`LoadedModel.forward` is the model definition; what is inside one operator (norm, projections, rotation, attention) is
in `twofold.ops`, where experts run is the business of the `MoeBackend` that is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twofold import ops
from twofold.model.config import ModelConfig
from twofold.model.model_files import ModelFiles, open_model_files
from twofold.model.rope import RopeTable
from twofold.model.tensor_source import TensorSource
from twofold.model.weight_plan import MoePlan, TensorSpec, expert_tensors
from twofold.model.weights import (
    DenseFfnWeights,
    ExpertWeights,
    LayerWeights,
    LoadProgress,
    ProgressFn,
    RouterWeights,
    dense_weights,
    expert_weights,
)
from twofold.weight_format import WeightMatrix

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class MoeBackend(Protocol):
    """Runs the routed experts of one layer, wherever it sees fit. `experts/` implements it."""

    def forward(self, moe_layer: int, normed: F32, ids: I32, weights: F32, hidden: F32) -> None:
        """hidden[t] += sum over k, in that order, of weights[t, k] * expert ids[t, k] of normed[t].

        Args:
            moe_layer: counts layers with experts only, from 0.
            normed: [T, hidden], the router's input.
            ids: [T, top_k], by descending weight.
            weights: [T, top_k].
            hidden: [T, hidden], in and out.
        """

    @property
    def wants_prediction(self) -> bool:
        """Whether this step should call `predict`; asked once per step, and a step without pays nothing."""

    def predict(self, moe_layer: int, logits: F32) -> None:
        """What the router of `moe_layer` says to the residual that enters the experts of the layer before.

        Comes before `forward` of that layer before; its own routing follows in its own `forward`.

        Args:
            moe_layer: the layer ahead, from 1.
            logits: [T, num_experts], before softmax.
        """


@dataclass(frozen=True)
class BatchMeta:
    """Where each token of a flattened batch belongs. Prefill chunks and decode tokens may be mixed."""

    positions: I32
    """[T] in the token's own sequence."""
    sequence_index: I32
    """[T], rows of the tables below."""
    page_tables: I32
    """[S, max_pages]: the KV cache pages of each sequence, in order; must cover the positions of this batch."""
    prompt_lengths: I32
    """[S] tokens of each whole prompt. Only dynamic RoPE scaling looks at it (see `rope.py`)."""


@dataclass(frozen=True)
class DecoderLayer:
    """The native operators of one layer; exactly one of `router` and `dense` is there."""

    index: int
    attention: ops.AttentionBlock
    router: ops.Router | None
    dense: ops.DenseFfn | None
    moe_layer: int
    """Which of the layers with experts this is; -1 for a dense layer."""


class LoadedModel:
    """Weights in memory and the operators on them. Immutable, but all calls share one thread team: one at a time."""

    def __init__(self, files: ModelFiles, team: ops.ThreadTeam, progress: ProgressFn | None = None) -> None:
        """Pack everything but the experts on `team`; the files' pages are let go behind."""
        config = files.config
        self.config = config
        self.files = files
        self.moe_layers = list(config.moe_layers)
        weights = dense_weights(files)
        self._team = team
        self.embedding: WeightMatrix = weights.embedding
        loading = _Loading(files, progress)
        self.layers: list[DecoderLayer] = []
        for index, layer in enumerate(weights.layers):
            self.layers.append(_make_layer(config, index, layer, team))
            loading.done(f"layer {index}")
        routers = [layer.router for layer in self.layers if layer.router is not None]
        self._routers_ahead = dict(enumerate(routers[1:]))
        """The router of the next layer with experts, by `moe_layer`."""
        head = ops.PackedMatrix(team, [weights.lm_head])
        self.lm_head = ops.LmHead(team, weights.final_norm, head, config.rms_norm_eps)
        loading.done("head")
        self._rope = RopeTable(config.rope, config.head_dim, config.max_position_embeddings)

    def expert_weights(self, layer: int) -> list[ExpertWeights]:
        """(gate [I, H], up [I, H], down [H, I]) of every expert of model layer `layer` (one of `moe_layers`).

        Views of the mapped files.
        """
        return expert_weights(self.files, layer)

    def expert_layers(self) -> Iterator[list[ExpertWeights]]:
        """`expert_weights` of all `moe_layers` in turn, for who packs them: copy a layer before asking for the next.

        The files' pages leave this process's memory after every layer, so that packing never holds the experts twice.
        """
        tensors = self.files.tensors
        names = [
            _with_companions(tensors, expert_tensors(ffn.experts))
            for plan in self.files.plan.layers
            if isinstance(ffn := plan.feed_forward, MoePlan)
        ]
        tensors.will_read(names[0] if names else ())
        for index, layer in enumerate(self.moe_layers):
            for ahead in names[index + 1 : index + 2]:
                tensors.will_read(ahead)
            yield self.expert_weights(layer)
            tensors.release_pages(names[index])

    def forward(self, token_ids: I32, batch: BatchMeta, kv_cache: ops.KvCache, moe: MoeBackend) -> F32:
        """Hidden states [T, hidden] after the last layer; their keys and values are in `kv_cache` afterwards."""
        hidden = self.embed(token_ids)
        attention_batch = self._attention_batch(batch)
        ahead = self._routers_ahead if moe.wants_prediction else {}
        for layer in self.layers:
            layer.attention.forward(hidden, attention_batch, kv_cache, layer.index)
            if layer.router is not None:
                normed, ids, weights = self._route(layer.router, hidden)
                if layer.moe_layer in ahead:
                    moe.predict(layer.moe_layer + 1, self._gate_logits(ahead[layer.moe_layer], hidden))
                moe.forward(layer.moe_layer, normed, ids, weights, hidden)
            elif layer.dense is not None:
                layer.dense.forward(hidden)
        return hidden

    def embed(self, token_ids: I32) -> F32:
        """[T, hidden]. Token ids must be within the vocabulary."""
        hidden = np.empty((len(token_ids), self.config.hidden_size), np.float32)
        ops.embed(self._team, self.embedding, token_ids, hidden)
        return hidden

    def logits(self, hidden_rows: F32) -> F32:
        """[R, vocab] of the rows that the caller picked from forward's result (last tokens, as a rule)."""
        logits = np.empty((len(hidden_rows), self.config.vocab_size), np.float32)
        self.lm_head.forward(hidden_rows, logits)
        return logits

    def _route(self, router: ops.Router, hidden: F32) -> tuple[F32, I32, F32]:
        num_tokens, top_k = len(hidden), self.config.top_k
        normed = np.empty_like(hidden)
        ids = np.empty((num_tokens, top_k), np.int32)
        weights = np.empty((num_tokens, top_k), np.float32)
        router.forward(hidden, normed, ids, weights)
        return normed, ids, weights

    def _gate_logits(self, router: ops.Router, hidden: F32) -> F32:
        num_tokens, top_k = len(hidden), self.config.top_k
        logits = np.empty((num_tokens, self.config.num_experts), np.float32)
        ids = np.empty((num_tokens, top_k), np.int32)
        weights = np.empty((num_tokens, top_k), np.float32)
        router.forward(hidden, np.empty_like(hidden), ids, weights, logits)
        return logits

    def _attention_batch(self, batch: BatchMeta) -> ops.AttentionBatch:
        cos, sin = self._rope.rows(batch.positions, batch.prompt_lengths[batch.sequence_index])
        return ops.AttentionBatch(batch.positions, batch.sequence_index, batch.page_tables, cos, sin)


def load_model(path: str | Path, *, team: ops.ThreadTeam, progress: ProgressFn | None = None) -> LoadedModel:
    """Load a Hugging Face model directory: checks everything first, then packs the dense weights.

    Experts stay on disk until `LoadedModel.expert_weights` is asked for them. Raises ModelLoadError.
    """
    return LoadedModel(open_model_files(path), team, progress)


class _Loading:
    """Reads ahead of the packing of the dense weights, lets go of pages behind it and reports."""

    def __init__(self, files: ModelFiles, progress: ProgressFn | None) -> None:
        self._tensors = files.tensors
        self._progress = progress
        plan = files.plan
        head = plan.lm_head or plan.embedding
        self._steps = [
            *(_with_companions(files.tensors, layer.dense_tensors()) for layer in plan.layers),
            _with_companions(files.tensors, (plan.final_norm, head)),
        ]
        self._bytes = [sum(files.tensors.entry(name).num_bytes for name in step) for step in self._steps]
        self._steps_done = 0
        self._read_ahead()

    def done(self, current: str) -> None:
        self._tensors.release_pages(self._steps[self._steps_done])
        self._steps_done += 1
        self._read_ahead()
        if self._progress is not None:
            done = sum(self._bytes[: self._steps_done])
            self._progress(
                LoadProgress(
                    "dense weights", current, done, sum(self._bytes), self._steps_done, len(self._steps)
                )
            )

    def _read_ahead(self) -> None:
        for step in self._steps[self._steps_done : self._steps_done + 2]:
            self._tensors.will_read(step)


def _with_companions(tensors: TensorSource, specs: Iterable[TensorSpec]) -> list[str]:
    return [name for spec in specs for name in (spec.name, *tensors.companions(spec.name))]


def _make_layer(config: ModelConfig, index: int, weights: LayerWeights, team: ops.ThreadTeam) -> DecoderLayer:
    return DecoderLayer(
        index=index,
        attention=_make_attention(config, weights, team),
        router=_make_router(config, weights.feed_forward, team),
        dense=_make_dense(config, weights.feed_forward, team),
        moe_layer=config.moe_layers.index(index) if index in config.moe_layers else -1,
    )


def _make_attention(config: ModelConfig, weights: LayerWeights, team: ops.ThreadTeam) -> ops.AttentionBlock:
    attention = weights.attention
    return ops.AttentionBlock(
        team,
        attention.norm,
        ops.PackedMatrix(team, attention.qkv),
        attention.qkv_bias,
        attention.q_norm,
        attention.k_norm,
        ops.PackedMatrix(team, [attention.o]),
        attention.o_bias,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.head_dim**-0.5,
        config.sliding_window,
    )


def _make_router(
    config: ModelConfig, weights: DenseFfnWeights | RouterWeights, team: ops.ThreadTeam
) -> ops.Router | None:
    if not isinstance(weights, RouterWeights):
        return None
    # The gate decides where tokens go: its products are exact in float32, whatever the other weights are.
    gate = weights.gate
    plain = np.array(gate.data) if gate.format == "bf16" else ops.dequantise(team, gate)
    return ops.Router(
        team, weights.norm, plain, config.top_k, config.norm_topk_prob, config.rms_norm_eps, "softmax"
    )


def _make_dense(
    config: ModelConfig, weights: DenseFfnWeights | RouterWeights, team: ops.ThreadTeam
) -> ops.DenseFfn | None:
    if not isinstance(weights, DenseFfnWeights):
        return None
    gate, up, down = (ops.PackedMatrix(team, [m]) for m in (weights.gate, weights.up, weights.down))
    return ops.DenseFfn(team, weights.norm, gate, up, down, config.rms_norm_eps)
