"""Times of a model's layers and head on this CPU, without routed experts.

Layers have the model's own weights, and those that differ only in their weights are measured once. Before a single
token a part of a head runs, so that the pool's threads are awake and the caches hold other weights, as in a step of the
whole model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from twofold.blocks import ops
from twofold.blocks.alone import alone
from twofold.blocks.block import ExpertBlock, ResidualBlock
from twofold.blocks.rope import rope_tables
from twofold.experts.calibration import random_matrix
from twofold.models.config import CacheDType
from twofold.models.model_files import ModelFiles, OpenBlock
from twofold.weights.weight_format import source_row_bytes

_PAGE_SIZE: Final = 16
_REPEATS: Final = 5
_CHUNK_REPEATS: Final = 2
_HEAD_BYTES: Final = 64 << 20
"""Size of the measured part of the head: more than the caches hold."""


@dataclass(frozen=True)
class StepPart:
    """Tokens of one sequence that a step computes, from position `begin` on."""

    tokens: int
    begin: int


class LayerTimes:
    """Measures steps through the layers of a model, with a KV cache of the given type."""

    def __init__(
        self,
        files: ModelFiles,
        pool: ops.ThreadPool,
        cache_dtype: CacheDType,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._files, self._pool, self._cache_dtype, self._clock = files, pool, cache_dtype, clock
        self._ropes = rope_tables(files.config.rotations, files.config.max_position_embeddings)
        self._head = self._part_of_head()
        self._logits = np.empty((1, self._head[1]), np.float32)

    def of_head(self) -> float:
        """Microseconds of the head for one token."""
        hidden = np.ones((1, self._files.config.hidden_size), np.float32)
        taken = []
        for _ in range(_REPEATS):
            began = self._clock()
            self._head[0].forward(hidden, self._logits)
            taken.append(self._clock() - began)
        return 1e6 * float(np.median(taken)) * self._files.config.head.num_rows / self._head[1]

    def of_steps(self, steps: Sequence[StepPart]) -> list[float]:
        """Microseconds of each step, all layers together."""
        totals = [0.0] * len(steps)
        for layers in self._kinds():
            dense = self._dense_blocks(layers[0])
            if not dense:
                continue
            decoder = ops.Decoder([block.cpu(weights, self._pool, 0) for block, weights in dense])
            for i, step in enumerate(steps):
                totals[i] += len(layers) * self._measured_us(decoder, layers[0], step)
            self._files.release_layer(layers[0])
        return totals

    def _kinds(self) -> list[list[int]]:
        """Layers by what they consist of: blocks, shapes and formats."""
        kinds: dict[str, list[int]] = {}
        for index in range(self._files.config.num_target_layers):
            described = [
                (repr(replace(block, layer=0)), [weights.format(name) for name in weights.specs])
                for block, weights in self._dense_blocks(index)
            ]
            kinds.setdefault(repr(described), []).append(index)
        return list(kinds.values())

    def _dense_blocks(self, index: int) -> list[OpenBlock]:
        """Blocks of a layer that run without its routed experts and without earlier layers."""
        layer = self._files.layers[index]
        found: list[OpenBlock | None] = []
        for n, (block, weights) in enumerate(layer):
            if isinstance(block, ResidualBlock):
                over = sum(each is not None for each in found[n - block.over :])
                found.append((replace(block, over=over), weights) if over else None)
            else:
                found.append(None if isinstance(block, ExpertBlock) else (alone(block), weights))
        return [each for each in found if each is not None]

    def _measured_us(self, decoder: ops.Decoder, index: int, step: StepPart) -> float:
        """Median time of the layer `index`; its cache has no other layer but the one whose state it reads."""
        config = self._files.config
        pages = -(-(step.begin + step.tokens) // _PAGE_SIZE)
        record = [0] * index + [config.record_bytes[index]]
        read = (index, config.state_layers[index])
        planes = enumerate(config.cache_planes(self._cache_dtype)[: index + 1])
        kept = [of_layer if n in read else [] for n, of_layer in planes]
        cache = ops.StateCache(kept, pages, _PAGE_SIZE, record, 1)
        batch = self._batch(step, pages)
        hidden = np.random.default_rng(0).standard_normal((step.tokens, config.hidden_size), np.float32)
        inputs = config.embedding.layer_inputs
        of_layers = None if inputs is None else np.ones((step.tokens, inputs.width), np.float32)
        taken = []
        for _ in range(_REPEATS if step.tokens == 1 else _CHUNK_REPEATS):
            given = hidden.copy()
            if step.tokens == 1:
                self._head[0].forward(given, self._logits)
            began = self._clock()
            decoder.forward(given, batch, cache, layer_inputs=of_layers)
            taken.append(self._clock() - began)
        return 1e6 * float(np.median(taken))

    def _part_of_head(self) -> tuple[ops.LmHead, int]:
        """Random rows of the head's width and format, and their number."""
        head, hidden = self._files.head, self._files.config.hidden_size
        name = max(head.specs, key=lambda each: math.prod(head.specs[each].shape))
        format_name = head.format(name)
        rows = 256 * max(1, _HEAD_BYTES // (256 * source_row_bytes(format_name, hidden)))
        matrix = random_matrix(np.random.default_rng(0), format_name, rows, hidden)
        packed = ops.PackedMatrix(self._pool, [matrix])
        return ops.LmHead(self._pool, np.ones(hidden, np.float32), packed, 1e-6), rows

    def _batch(self, step: StepPart, pages: int) -> ops.AttentionBatch:
        positions = np.arange(step.begin, step.begin + step.tokens, dtype=np.int32)
        prompt = np.full(step.tokens, step.begin + step.tokens, np.int32)
        (cos, sin), *further = (rope.rows(positions, prompt) for rope in self._ropes)
        index, record = np.zeros(step.tokens, np.int32), np.zeros(1, np.int32)
        batch = ops.AttentionBatch(positions, index, np.arange(pages, dtype=np.int32)[None], cos, sin, record)
        for rows in further:
            batch.add_rotation(*rows)
        return batch
