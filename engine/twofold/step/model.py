"""A loaded model: computes logits from token ids with the native operators.

The layers run in one native call (`ops.Decoder`). The executor passed in decides where experts run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.api.errors import ModelLoadError
from twofold.api.media import MediaPart, deep_rows
from twofold.blocks import ops
from twofold.blocks.mtp_input import MtpInput
from twofold.blocks.rope import rope_tables
from twofold.models.config import ModelConfig, num_residual_streams
from twofold.models.model_files import LoadProgress, ModelFiles, ProgressFn
from twofold.step.adapter_rows import AdapterSteps
from twofold.step.mtp_layer import MtpLayer, states_of
from twofold.weights.weight_format import ExpertWeights

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class BatchMeta:
    """Sequence and position of each token of a flattened batch. Prefill chunks and decode tokens may be mixed."""

    positions: I32
    """[T] position in the token's own sequence."""
    sequence_index: I32
    """[T] row of the tables below."""
    page_tables: I32
    """[S, max_pages] block table: KV cache pages of each sequence, in order; covers the positions of this batch."""
    prompt_lengths: I32
    """[S] length of each whole prompt. Used only by dynamic RoPE scaling (see `rope.py`)."""
    last_position: int | None = None
    """Maximum of `positions`, if known."""
    records: I32 | None = None
    """[S] record number of each sequence, used only by layers that keep records."""
    kept_records: I32 | None = None
    """[T] further record that receives the state after each token, -1 for none; None: no draft is verified."""
    rotations: I32 | None = None
    """[axes, T] positions in rotary embedding where pictures have others; None: `positions`."""
    block_rotations: Callable[[int], I32 | None] = lambda block: None
    """The same of the positions at which the tokens' blocks of so many positions begin."""
    ends: I32 | None = None
    """[T] position after the last one that a token attends to in bidirectional layers; None: the one after its own."""
    ids: I64 | None = None
    """[T, num_ids] see `TableInputs.num_ids`; None: each token's own, of which no layer needs more."""


class AttentionBatches:
    """Makes what every layer's attention needs of a batch of one model, including rotations."""

    def __init__(self, config: ModelConfig) -> None:
        self._rope, *self._further_ropes = rope_tables(config.rotations, config.max_position_embeddings)

    def of(self, batch: BatchMeta) -> ops.AttentionBatch:
        positions, rope, records = batch.positions, self._rope, batch.records
        if batch.rotations is not None:
            cos, sin = rope.rows_by_axis(batch.rotations)
            made = ops.AttentionBatch(positions, batch.sequence_index, batch.page_tables, cos, sin, records)
        elif rope.has_tables:
            tables = rope.tables(1 + (batch.last_position or int(positions.max(initial=-1))))
            made = ops.AttentionBatch.of_table(
                positions, batch.sequence_index, batch.page_tables, *tables, records
            )
        else:
            cos, sin = rope.rows(positions, batch.prompt_lengths[batch.sequence_index])
            made = ops.AttentionBatch(positions, batch.sequence_index, batch.page_tables, cos, sin, records)
        for further in self._further_ropes:
            turned = batch.block_rotations(further.block) if further.block > 1 else None
            if turned is not None:
                made.add_rotation(*further.rows_by_axis(turned))
            else:
                made.add_rotation(*further.rows(positions, batch.prompt_lengths[batch.sequence_index]))
        if batch.kept_records is not None:
            made.keep_records(batch.kept_records)
        if batch.ends is not None:
            made.see_until(batch.ends)
        return made


@dataclass(frozen=True)
class PerModule(Generic[T]):
    """One value per part of a model, in the order of `ModelFiles.parts`."""

    embedding: T
    blocks: tuple[T, ...]
    head: T


class LoadedModel:
    """Weights in memory and the operators on them. Immutable, but all calls share one thread pool: one call at a
    time."""

    def __init__(
        self,
        files: ModelFiles,
        pool: ops.ThreadPool,
        progress: ProgressFn | None = None,
        threads: PerModule[int] | None = None,
        pools: PerModule[ops.ThreadPool] | None = None,
        tapped_layers: Sequence[int] = (),
    ) -> None:
        """Pack everything but the experts on `pool`; the files' pages are released afterwards.

        Args:
            threads: threads of the pool per part, 0 for all; None: all.
            pools: per-part views of `pool` with that part's kernels; None: the process's kernels.
            tapped_layers: layers before which `forward` copies the hidden states to `tapped`, ascending.
        """
        config = files.config
        if tapped_layers and (num_streams := num_residual_streams(config.layers)) > 1:
            raise ModelLoadError(
                f"{files.tensors.where}: a draft head that reads hidden states between layers was given; the model has "
                f"{num_streams} there for each token; choose another method in --speculative-config"
            )
        self.config = config
        self.files = files
        self.moe_layers = list(config.moe_layers)
        self.pool = pool
        pools = pools or PerModule(pool, (pool,) * sum(map(len, files.layers)), pool)
        self._embedding = config.embedding.cpu(files.embedding, pools.embedding)
        layer_inputs = config.embedding.layer_inputs
        self._layer_inputs = (
            None if layer_inputs is None else layer_inputs.cpu(files.embedding, pools.embedding)
        )
        loading = _Loading(files, progress)
        blocks: list[ops.Block] = []
        moe_layer = 0
        for index, layer in enumerate(files.layers):
            of_layer = pools.blocks[len(blocks) :]
            blocks += [
                block.cpu(weights, view, moe_layer)
                for (block, weights), view in zip(layer, of_layer, strict=False)
            ]
            moe_layer += index in config.moe_layers
            loading.done(f"layer {index}")
        self._threads = threads
        num_blocks = sum(map(len, files.layers[: config.num_target_layers]))
        self._decoder = self._decoder_of(blocks, 0, num_blocks)
        self.lm_head = config.head.cpu(files.head, pools.head)
        self.mtp = self._mtp_layer(blocks, num_blocks)
        """Predicts the token after the next one; None: the model's files were opened without it."""
        loading.done("head")
        self.adapters = AdapterSteps()
        """Adapters of the next rows."""
        self.tapped: list[F32] = []
        """Hidden states [T, hidden] of the newest step before each of the tapped layers."""
        self._blocks = blocks[:num_blocks]
        self._tapped_layers = frozenset(tapped_layers)
        self._stretches: dict[frozenset[int], list[tuple[int, ops.Decoder | None]]] = {}
        """(first layer, its and further blocks) by the layers at which the blocks are cut."""
        self._logits = self._all_logits = np.empty((0, config.head.num_rows), np.float32)
        self.attention_batch = AttentionBatches(config).of

    def _decoder_of(self, blocks: list[ops.Block], begin: int, end: int) -> ops.Decoder:
        if self._threads is None:
            return ops.Decoder(blocks[begin:end])
        return ops.Decoder(blocks[begin:end], self.pool, self._threads.blocks[begin:end])

    def _mtp_layer(self, blocks: list[ops.Block], begin: int) -> MtpLayer | None:
        if begin == len(blocks):
            return None
        block, weights = self.files.layers[-1][0]
        assert isinstance(block, MtpInput), "an MTP layer without its input"
        norm = block.head_norm(weights)
        return MtpLayer(
            self._decoder_of(blocks, begin, len(blocks)),
            self.lm_head if norm is None else self.lm_head.with_norm(norm),
            self.embed,
        )

    def expert_weights(self, layer: int) -> Sequence[ExpertWeights]:
        """(gate [I, H], up [I, H], down [H, I]) of every expert of model layer `layer` (one of `moe_layers`).

        Views of the mapped files.
        """
        return self.files.expert_weights(layer)

    def forward(
        self,
        token_ids: I32,
        batch: BatchMeta | ops.AttentionBatch,
        kv_cache: ops.StateCache,
        experts: _core.MoeExecutor,
        media: Sequence[MediaPart] = (),
        ids: I64 | None = None,
    ) -> F32:
        """Hidden states [T, hidden] after the last layer. Writes the tokens' keys and values to `kv_cache`.

        media: pictures' rows among the tokens. ids: see `BatchMeta`, if `batch` is none.
        """
        hidden = self.embed(token_ids)
        for part in media:
            hidden[part.where] = part.rows
        if isinstance(batch, BatchMeta):
            ids = batch.ids
        inputs = self._inputs_of_layers(token_ids, ids, hidden, media)
        prepared = self.attention_batch(batch) if isinstance(batch, BatchMeta) else batch
        num_deep = max((part.num_deep for part in media), default=0)
        cuts = self._tapped_layers.union(range(1, num_deep + 1))
        if not cuts:
            self._decoder.forward(hidden, prepared, kv_cache, experts, layer_inputs=inputs)
            return hidden
        self.tapped = []
        for first_layer, decoder in self._stretches_of(cuts):
            for where, rows in deep_rows(media, first_layer - 1):
                hidden[where] += rows
            if first_layer in self._tapped_layers:
                self.tapped.append(hidden.copy())
            if decoder is not None:
                decoder.forward(hidden, prepared, kv_cache, experts, layer_inputs=inputs)
        return hidden

    @property
    def num_ids(self) -> int:
        """Token ids that a token's inputs of layers depend on; 0: no layer has such inputs."""
        inputs = self.config.embedding.layer_inputs
        return 0 if inputs is None else inputs.num_ids

    def read_ahead(self, ids: I64) -> None:
        """Start reading table rows of tokens that a later step computes; ids [T, num_ids]."""
        if self._layer_inputs is not None:
            self._layer_inputs.read_ahead(ids)

    def _inputs_of_layers(
        self, token_ids: I32, ids: I64 | None, hidden: F32, media: Sequence[MediaPart]
    ) -> F32 | None:
        """Inputs of the layers for tokens and their embeddings; None if layers have none of their own."""
        layer_inputs = self.config.embedding.layer_inputs
        if self._layer_inputs is None or layer_inputs is None:
            return None
        if ids is None:
            assert layer_inputs.num_ids == 1, "a batch without the tokens before its own"
            ids = token_ids[:, None].astype(np.int64)
        if (media_token := layer_inputs.media_token) is not None:
            for part in media:
                ids[part.where, 0] = media_token
        inputs = np.empty((len(token_ids), layer_inputs.width), np.float32)
        with nullcontext() if self._threads is None else self._limited(self._threads.embedding):
            self._layer_inputs.forward(ids, hidden, inputs)
        return inputs

    def _stretches_of(self, cuts: frozenset[int]) -> list[tuple[int, ops.Decoder | None]]:
        """(first layer, blocks from it up to the next cut): before each of the layers `cuts` the blocks are cut. None
        where there are no blocks: a cut after the last layer."""
        if cuts not in self._stretches:
            counts = [0, *accumulate(map(len, self.files.layers[: self.config.num_target_layers]))]
            layers = sorted(cuts | {0})
            ends = [counts[layer] for layer in layers[1:]] + [counts[-1]]
            self._stretches[cuts] = [
                (layer, self._decoder_of(self._blocks, counts[layer], end) if counts[layer] < end else None)
                for layer, end in zip(layers, ends, strict=True)
            ]
        return self._stretches[cuts]

    @property
    def embedding(self) -> ops.Embedding:
        return self._embedding

    def embed(self, token_ids: I32) -> F32:
        """Embeddings [T, hidden]. Token ids must be within the vocabulary."""
        hidden = np.empty((len(token_ids), self.config.hidden_size), np.float32)
        with nullcontext() if self._threads is None else self._limited(self._threads.embedding):
            self._embedding.forward(token_ids, hidden)
        self.adapters.change_embeddings(token_ids, hidden)
        self.config.embedding.scale_rows(hidden)
        return hidden

    def states(self, hidden: F32) -> F32:
        """What the MTP layer reads of the newest `forward`, whose result is `hidden`."""
        return states_of(self._decoder, self.lm_head, hidden)

    def final_states(self, hidden_rows: F32) -> F32:
        """Hidden states [R, hidden] after the last norm, of rows of forward's result."""
        normed = np.empty_like(hidden_rows)
        self.lm_head.norm(hidden_rows, normed)
        return normed / np.float32(self.config.head.scale)

    def logits(self, hidden_rows: F32) -> F32:
        """Logits [R, vocab], or a classifier's [R, labels], of rows of forward's result, usually the last tokens.

        The next call overwrites them: fresh memory for each call would cost a decode step its page faults.
        """
        num_rows = len(hidden_rows)
        if len(self._logits) != num_rows:
            if len(self._all_logits) < num_rows:
                self._all_logits = np.empty((num_rows, self.config.head.num_rows), np.float32)
            self._logits = self._all_logits[:num_rows]
        with nullcontext() if self._threads is None else self._limited(self._threads.head):
            self.lm_head.forward(hidden_rows, self._logits)
        self.adapters.change_logits(hidden_rows, self._logits)
        return self._logits

    @contextmanager
    def _limited(self, num_threads: int) -> Iterator[None]:
        """Limit the pool to `num_threads` threads; 0: all."""
        self.pool.limit(num_threads)
        try:
            yield
        finally:
            self.pool.limit(0)


class _Loading:
    """Reads ahead while dense weights are packed, releases packed pages and reports progress."""

    def __init__(self, files: ModelFiles, progress: ProgressFn | None) -> None:
        self._tensors = files.tensors
        self._progress = progress
        layers = range(files.config.num_layers)
        self._steps = [*map(files.dense_names, layers), files.head.names]
        if files.mapped is not None:  # no rows are read; `Residency` loads the panels
            self._steps = [[] for _ in self._steps]
        self._experts = [] if files.mapped is not None else files.expert_names()[:2]  # needed next
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
                    "dense weights",
                    current,
                    done,
                    sum(self._bytes),
                    steps_done=self._steps_done,
                    steps_total=len(self._steps),
                )
            )

    def _read_ahead(self) -> None:
        for step in [*self._steps, *self._experts][self._steps_done : self._steps_done + 3]:
            self._tensors.will_read(step)
