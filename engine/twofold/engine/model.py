"""A loaded model: from token ids to logits, on the native operators.

The layers run in one native call (`ops.Decoder`); where experts run is the business of the executor that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.api.errors import KernelError, ModelLoadError
from twofold.blocks import ops
from twofold.blocks.rope import RopeTable
from twofold.blocks.weights import (
    DenseFfnWeights,
    ExpertWeights,
    LayerWeights,
    LoadProgress,
    ProgressFn,
    RouterWeights,
    dense_weights,
    expert_names,
    expert_weights,
    with_companions,
)
from twofold.models.config import ModelConfig
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.weights.weight_format import WeightMatrix

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Planes = tuple[int, int, Literal["float32", "bfloat16"]]


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


class LoadedModel:
    """Weights in memory and the operators on them. Immutable, but all calls share one thread team: one at a time."""

    def __init__(self, files: ModelFiles, team: ops.ThreadTeam, progress: ProgressFn | None = None) -> None:
        """Pack everything but the experts on `team`; the files' pages are let go behind."""
        config = files.config
        self.config = config
        self.files = files
        self.moe_layers = list(config.moe_layers)
        weights = dense_weights(files)
        self.team = team
        self.embedding: WeightMatrix = weights.embedding
        loading = _Loading(files, progress)
        blocks: list[ops.Block] = []
        for index, layer in enumerate(weights.layers):
            moe_layer = self.moe_layers.index(index) if index in self.moe_layers else None
            blocks += make_layer(config, index, layer, team, moe_layer)
            loading.done(f"layer {index}")
        self._decoder = ops.Decoder(blocks)
        head = _packed(team, [weights.lm_head], "head")
        self.lm_head = ops.LmHead(team, weights.final_norm, head, config.rms_norm_eps)
        loading.done("head")
        self._logits = np.empty((0, config.vocab_size), np.float32)
        self._rope = RopeTable(config.rope, config.head_dim, config.max_position_embeddings)

    def expert_weights(self, layer: int) -> list[ExpertWeights]:
        """(gate [I, H], up [I, H], down [H, I]) of every expert of model layer `layer` (one of `moe_layers`).

        Views of the mapped files.
        """
        return expert_weights(self.files, layer)

    def forward(
        self,
        token_ids: I32,
        batch: BatchMeta | ops.AttentionBatch,
        kv_cache: ops.StateCache,
        experts: _core.MoeExecutor,
    ) -> F32:
        """Hidden states [T, hidden] after the last layer; their keys and values are in `kv_cache` afterwards."""
        hidden = self.embed(token_ids)
        prepared = self.attention_batch(batch) if isinstance(batch, BatchMeta) else batch
        self._decoder.forward(hidden, prepared, kv_cache, experts)
        return hidden

    def embed(self, token_ids: I32) -> F32:
        """[T, hidden]. Token ids must be within the vocabulary."""
        hidden = np.empty((len(token_ids), self.config.hidden_size), np.float32)
        ops.embed(self.team, self.embedding, token_ids, hidden)
        return hidden

    def logits(self, hidden_rows: F32) -> F32:
        """[R, vocab] of the rows that the caller picked from forward's result (last tokens, as a rule).

        They are overwritten by the next call: fresh memory for each would cost a decode step its page faults.
        """
        num_rows = len(hidden_rows)
        if len(self._logits) < num_rows:
            self._logits = np.empty((num_rows, self.config.vocab_size), np.float32)
        logits = self._logits[:num_rows]
        self.lm_head.forward(hidden_rows, logits)
        return logits

    def attention_batch(self, batch: BatchMeta) -> ops.AttentionBatch:
        """What every layer's attention needs of a batch, rotations included."""
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
            *(with_companions(files.tensors, layer.dense_tensors()) for layer in plan.layers),
            with_companions(files.tensors, (plan.final_norm, head)),
        ]
        self._experts = expert_names(files)[:2]  # whose turn is next
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
        for step in [*self._steps, *self._experts][self._steps_done : self._steps_done + 3]:
            self._tensors.will_read(step)


def _packed(team: ops.ThreadTeam, parts: list[WeightMatrix], what: str) -> ops.PackedMatrix:
    try:
        return ops.PackedMatrix(team, parts)
    except KernelError as error:
        raise ModelLoadError(f"{what}: {error}; the weights are damaged, download them again") from None


def make_layer(
    config: ModelConfig, index: int, weights: LayerWeights, team: ops.ThreadTeam, moe_layer: int | None
) -> list[ops.Block]:
    """Pack one layer's dense weights: its blocks. `moe_layer` is the executor's number of it, None without experts."""
    blocks: list[ops.Block] = [_make_attention(config, index, weights, team)]
    if isinstance(weights.feed_forward, DenseFfnWeights):
        return [*blocks, _make_dense(config, index, weights.feed_forward, team)]
    assert moe_layer is not None
    router = _make_router(config, weights.feed_forward, team)
    return [*blocks, router, ops.RoutedExperts(config.hidden_size, moe_layer)]


def state_planes(config: ModelConfig, dtype: Literal["float32", "bfloat16"]) -> list[list[Planes]]:
    """What `ops.StateCache` is to keep of each token, by layer."""
    return [[(2 * config.num_kv_heads, config.head_dim, dtype)]] * config.num_layers


def _make_attention(config: ModelConfig, index: int, weights: LayerWeights, team: ops.ThreadTeam) -> ops.Gqa:
    attention = weights.attention
    return ops.Gqa(
        team,
        attention.norm,
        _packed(team, list(attention.qkv), f"layer {index}, attention"),
        attention.qkv_bias,
        attention.q_norm,
        attention.k_norm,
        _packed(team, [attention.o], f"layer {index}, attention"),
        attention.o_bias,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.head_dim**-0.5,
        config.sliding_window,
        index,
    )


def _make_router(config: ModelConfig, weights: RouterWeights, team: ops.ThreadTeam) -> ops.Router:
    # The gate decides where tokens go: its products are exact in float32, whatever the other weights are.
    gate = weights.gate
    plain = np.array(gate.data) if gate.format == "bf16" else ops.dequantise(team, gate)
    shape = ops.RouterShape(config.top_k, renormalise=config.norm_topk_prob)
    return ops.Router(team, weights.norm, plain, config.rms_norm_eps, shape)


def _make_dense(
    config: ModelConfig, index: int, weights: DenseFfnWeights, team: ops.ThreadTeam
) -> ops.DenseFfn:
    matrices = (weights.gate, weights.up, weights.down)
    gate, up, down = (_packed(team, [m], f"layer {index}, feed-forward") for m in matrices)
    return ops.DenseFfn(team, weights.norm, gate, up, down, config.rms_norm_eps)
