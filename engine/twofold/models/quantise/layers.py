"""A model's forward pass over whole texts with one layer in memory at a time.

The operators are those that serve, so the logits are; only the order of the work differs: all tokens go through a layer
before the next one is packed. What stays in memory is one layer, the hidden states and one layer's KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.blocks.rope import RopeTable
from twofold.blocks.weights import dense_weights, expert_weights
from twofold.engine.model import make_layer
from twofold.experts.accelerator import AcceleratorChoice
from twofold.experts.moe import DenseCost, MoeRuntime, MoeShape, SlotPlan
from twofold.models.model_files import ModelFiles

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_Layer = tuple[ops.AttentionBlock, ops.Router | None, ops.DenseFfn | None]
_PAGE_SIZE = 16


class LayeredModel:
    """Reads sequences of tokens (teacher forcing). Nothing of the weights is kept between calls but the head."""

    def __init__(self, files: ModelFiles, team: ops.ThreadTeam) -> None:
        self._files = files
        self._team = team
        self._weights = dense_weights(files)
        config = files.config
        self._rope = RopeTable(config.rope, config.head_dim, config.max_position_embeddings)
        self._head: ops.LmHead | None = None

    def hidden_states(
        self, sequences: Sequence[Sequence[int]], progress: Callable[[int, int], None] | None = None
    ) -> list[F32]:
        """[tokens, hidden] of each sequence after the last layer; `progress` is told (layers done, layers in all)."""
        config = self._files.config
        cache = ops.KvCache(
            1, max(self._num_pages(seq) for seq in sequences), _PAGE_SIZE, config.num_kv_heads, config.head_dim
        )  # fmt: skip
        states = [self._embed(np.array(sequence, np.int32)) for sequence in sequences]
        for index, weights in enumerate(self._weights.layers):
            layer = make_layer(config, index, weights, self._team)
            moe = self._experts(index) if index in config.moe_layers else None
            for hidden in states:
                self._forward(layer, moe, hidden, cache)
            del layer, moe
            self._release(index)
            if progress is not None:
                progress(index + 1, config.num_layers)
        return states

    def logits(self, hidden: F32) -> F32:
        """[rows, vocabulary] of rows of `hidden_states`."""
        if self._head is None:
            packed = ops.PackedMatrix(self._team, [self._weights.lm_head])
            self._head = ops.LmHead(
                self._team, self._weights.final_norm, packed, self._files.config.rms_norm_eps
            )
        logits = np.empty((len(hidden), self._files.config.vocab_size), np.float32)
        self._head.forward(np.ascontiguousarray(hidden), logits)
        return logits

    def _forward(self, layer: _Layer, moe: MoeRuntime | None, hidden: F32, cache: ops.KvCache) -> None:
        num_tokens = len(hidden)
        positions = np.arange(num_tokens, dtype=np.int32)
        cos, sin = self._rope.rows(positions, np.full(num_tokens, num_tokens, np.int32))
        pages = np.arange(self._num_pages(positions), dtype=np.int32)[None]
        batch = ops.AttentionBatch(positions, np.zeros(num_tokens, np.int32), pages, cos, sin)
        attention, _, dense = layer
        if moe is not None:
            moe.begin_step(0, [0] * num_tokens, positions.tolist())
            ops.Decoder([layer]).forward(hidden, batch, cache, moe.executor)
            moe.end_step()
        elif dense is not None:
            attention.forward(hidden, batch, cache, 0)
            dense.forward(hidden)

    def _experts(self, index: int) -> MoeRuntime:
        config = self._files.config
        formats = self._files.expert_formats()[config.moe_layers.index(index)]
        shape = MoeShape(
            1, config.num_experts, config.top_k, config.hidden_size, config.moe_intermediate_size, (formats,)
        )
        return MoeRuntime(
            shape,
            [expert_weights(self._files, index)],
            self._team,
            AcceleratorChoice("none", "asked for"),
            SlotPlan(0, ""),
            DenseCost([0.0, 0.0], [0.0, 0.0]),
        )

    def _embed(self, tokens: I32) -> F32:
        hidden = np.empty((len(tokens), self._files.config.hidden_size), np.float32)
        ops.embed(self._team, self._weights.embedding, tokens, hidden)
        return hidden

    def _release(self, index: int) -> None:
        self._files.release_layer(index)

    @staticmethod
    def _num_pages(tokens: Sequence[int] | I32) -> int:
        return -(-len(tokens) // _PAGE_SIZE)
