"""Forward pass of a model over whole sequences with one layer in memory at a time.

The operators, and so the logits, are those of serving. Only the order of the work differs: all tokens pass a layer
before the next one is packed. Memory holds one layer, the hidden states and one layer's KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.blocks.ngram_hash import ngram_ids
from twofold.blocks.rope import rope_tables
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.moe import MoeRuntime
from twofold.experts.slot_plan import DenseCost, SlotPlan
from twofold.models.config import CacheDType
from twofold.models.model_files import ModelFiles
from twofold.step.expert_loading import moe_shape
from twofold.weights.weight_format import LayerExperts

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_PAGE_SIZE = 16


class LayeredModel:
    """Model evaluated layer by layer on given sequences (teacher forcing). Only the head stays loaded between calls."""

    def __init__(self, files: ModelFiles, pool: ops.ThreadPool, cache_dtype: CacheDType = "float32") -> None:
        self._files = files
        self._cache_dtype = cache_dtype
        self._pool = pool
        config = files.config
        self._embedding = config.embedding.table(files.embedding)
        self._ropes = rope_tables(config.rotations, config.max_position_embeddings)
        self._head: ops.LmHead | None = None

    def hidden_states(self, sequences: Sequence[Sequence[int]]) -> list[F32]:
        """Hidden states [tokens, hidden] of each sequence after the last layer."""
        *_, states = self.hidden_states_by_layer(sequences)
        return states

    def hidden_states_by_layer(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[F32]]:
        """Hidden states after each layer in turn, in arrays that the next layer overwrites."""
        config = self._files.config
        planes = config.cache_planes(self._cache_dtype)
        pages = max(map(self._num_pages, sequences))
        tokens = [np.array(sequence, np.int32) for sequence in sequences]
        states = [self._embed(of_sequence) for of_sequence in tokens]
        inputs = list(map(self._inputs_of_layers, tokens, states))
        batches = [self._batch(len(of_sequence)) for of_sequence in tokens]
        read_later = {layer for layer in config.state_layers if config.state_layers.count(layer) > 1}
        kept: dict[int, list[ops.StateCache]] = {}  # each sequence's, where a later layer reads it
        for index, layer in enumerate(self._files.layers[: config.num_target_layers]):
            # No other layers use its cache but those that read its state; its experts are the only ones of its store.
            readers = [n for n, read in enumerate(config.state_layers) if read == index] or [index]
            of_cache = [planes[n] if n in readers else [] for n in range(max(readers) + 1)]
            record = [config.record_bytes[index] if n == index else 0 for n in range(len(of_cache))]
            caches = kept.get(config.state_layers[index]) or [
                ops.StateCache(of_cache, pages, _PAGE_SIZE, record, 1)
                for _ in (sequences if index in read_later else sequences[:1])
            ]
            if index in read_later:
                kept[index] = caches
            decoder = ops.Decoder([block.cpu(weights, self._pool, 0) for block, weights in layer])
            moe = self._experts(index)
            for n, (hidden, cache) in enumerate(zip(states, cycle(caches), strict=False)):
                if moe is not None:
                    moe.begin_step(0, [0] * len(hidden), list(range(len(hidden))))
                executor = None if moe is None else moe.executor
                decoder.forward(hidden, batches[n], cache, executor, layer_inputs=inputs[n])
                if moe is not None:
                    moe.executor.end_step()
            del decoder, moe, caches
            self._files.release_layer(index)
            yield states

    def logits(self, hidden: F32) -> F32:
        """Logits [rows, vocabulary] for rows of `hidden_states`."""
        if self._head is None:
            self._head = self._files.config.head.cpu(self._files.head, self._pool)
        logits = np.empty((len(hidden), self._files.config.head.num_rows), np.float32)
        self._head.forward(np.ascontiguousarray(hidden), logits)
        return logits

    def _batch(self, num_tokens: int) -> ops.AttentionBatch:
        """A whole sequence as a batch, which keeps the positions that an earlier layer chose."""
        positions = np.arange(num_tokens, dtype=np.int32)
        prompt = np.full(num_tokens, num_tokens, np.int32)
        (cos, sin), *further = (rope.rows(positions, prompt) for rope in self._ropes)
        pages = np.arange(self._num_pages(positions), dtype=np.int32)[None]
        record = np.zeros(1, np.int32)
        batch = ops.AttentionBatch(positions, np.zeros(num_tokens, np.int32), pages, cos, sin, record)
        for rows in further:
            batch.add_rotation(*rows)
        return batch

    def _experts(self, index: int) -> MoeRuntime | None:
        if index not in self._files.config.moe_layers:
            return None
        shape = moe_shape(self._files)
        place = self._files.config.moe_layers.index(index)
        of_layer = slice(place, place + 1)
        return MoeRuntime(
            replace(shape, num_layers=1, formats=shape.formats[of_layer], limits=shape.limits[of_layer]),
            [LayerExperts(self._files.expert_weights(index), self._files.expert_biases(index))],
            self._pool,
            AcceleratorChoice("none", "asked for"),
            SlotPlan(0, ""),
            DenseCost([0.0, 0.0], [0.0, 0.0]),
        )

    def _embed(self, tokens: I32) -> F32:
        hidden = np.empty((len(tokens), self._files.config.hidden_size), np.float32)
        ops.embed(self._pool, self._embedding, tokens, hidden)
        self._files.config.embedding.scale_rows(hidden)
        return hidden

    def _inputs_of_layers(self, tokens: I32, hidden: F32) -> F32 | None:
        layer_inputs = self._files.config.embedding.layer_inputs
        if layer_inputs is None:
            return None
        inputs = np.empty((len(tokens), layer_inputs.width), np.float32)
        ids = ngram_ids(tokens, 0, layer_inputs.num_ids)
        layer_inputs.cpu(self._files.embedding, self._pool).forward(ids, hidden, inputs)
        return inputs

    @staticmethod
    def _num_pages(tokens: Sequence[int] | I32) -> int:
        return -(-len(tokens) // _PAGE_SIZE)
