"""EAGLE-3's head: one decoder layer that reads three of the target's hidden states and the next token's embedding.

As published (arXiv 2503.01840, SafeAILab/EAGLE): `fc` joins the three states to one; the layer's attention reads that
state and the embedding, each normed, side by side; the layer's output is the state of the next drafted token, and after
`norm` and `lm_head` the logits of a reduced vocabulary, whose entry i is the target's token i + `d2t`[i].

The layer consists of the operators that models are made of. Two of them have a norm that the head has not: there the
norm's epsilon is so large that it only scales, and its weights undo that.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.gqa import Gqa
from twofold.blocks.rope import RopeConfig, RopeTable
from twofold.models import config_json
from twofold.models.config import CacheDType, cache_row_bytes
from twofold.weights.checkpoint import Checkpoint
from twofold.weights.json_file import Fields
from twofold.weights.tensor_spec import TensorSpec
from twofold.weights.weight_format import WeightMatrix

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_SCALE: Final = np.float32(1e6)
_NO_NORM: Final = 1e12
"""Epsilon of a norm that divides by 1e6, whatever its input."""
_DEFAULTS: Final = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Eagle3Config:
    """The head's config.json."""

    attention: Gqa
    """With the sizes of the head; its input is twice as wide."""
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    rope: RopeConfig
    rope_dim: int
    max_positions: int
    norms_before_residual: bool
    target_layers: tuple[int, ...]
    """Layers of the target before which a hidden state is read; empty: as published."""

    @classmethod
    def read(cls, directory: Path) -> Eagle3Config:
        """Raises ModelLoadError naming the file and the key."""
        fields = config_json.read_config_json(directory).defaulting(_DEFAULTS)
        if (layers := config_json.num_layers_of(fields)) != 1:
            raise fields.error("num_hidden_layers", layers, "1, an EAGLE-3 head of one layer")
        config_json.read_activation(fields)
        attention = config_json.read_attention(fields)
        vocab_size = fields.integer("vocab_size")
        own = fields.section("eagle_config") or fields
        return cls(
            attention=attention,
            intermediate_size=fields.integer("intermediate_size"),
            vocab_size=vocab_size,
            draft_vocab_size=fields.optional_integer("draft_vocab_size") or vocab_size,
            target_hidden_size=fields.optional_integer("target_hidden_size") or attention.hidden_size,
            rope=config_json.read_rope(fields),
            rope_dim=attention.head_dim,
            max_positions=fields.integer("max_position_embeddings"),
            norms_before_residual=fields.boolean("norm_before_residual", False),
            target_layers=_target_layers(fields, own),
        )

    def layers_of(self, num_layers: int, where: Path) -> tuple[int, int, int]:
        """The three layers of a target of `num_layers` before which its hidden state is read. Raises ModelLoadError."""
        layers = self.target_layers or (2, num_layers // 2, num_layers - 3)
        first, *others = sorted(set(layers))
        if len(others) != 2 or first < 0 or others[-1] > num_layers:
            raise ModelLoadError(
                f"{where}: the head reads hidden states before layers {list(layers)}; expected three layers of the "
                f"model's {num_layers}; give the head that was trained for this model"
            )
        return first, others[0], others[1]

    def cache_planes(self, dtype: CacheDType) -> list[list[tuple[int, int, CacheDType]]]:
        """See `ModelConfig.cache_planes`."""
        return [[(2 * self.attention.num_kv_heads, self.attention.head_dim, dtype)]]

    def bytes_per_token(self, dtype: CacheDType) -> int:
        return 2 * self.attention.num_kv_heads * cache_row_bytes(dtype, self.attention.head_dim)


def _target_layers(*sections: Fields) -> tuple[int, ...]:
    found = (section.integers("eagle_aux_hidden_state_layer_ids") for section in sections)
    return next(filter(None, found), ())


class Eagle3Files:
    """A head's directory: configuration and headers, checked; no weights are read."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelLoadError for a missing, damaged or other file."""
        self.directory = directory
        self.config = Eagle3Config.read(directory)
        # The files of some exports have the names of a model around it, and a list of layers.
        self.tensors = Checkpoint.open(
            directory, renamed=(("model.layers.0.", "midlayer."), ("layers.0.", "midlayer."), ("model.", ""))
        )
        self.weights = BlockWeights(self.tensors, self._specs())
        self.weights.check()

    @property
    def has_embedding(self) -> bool:
        return "embed_tokens.weight" in self.tensors

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, packed."""
        return sum(self.weights.packed_bytes(part) for part in self.weights.specs if part != "embedding")

    def _specs(self) -> dict[str, TensorSpec]:
        config, attention = self.config, self.config.attention
        hidden, wide = attention.hidden_size, config.intermediate_size
        out_rows, kv_rows = (
            heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)
        )
        matrices = {
            "fc": ("fc", (hidden, 3 * config.target_hidden_size)),
            "q": ("midlayer.self_attn.q_proj", (out_rows, 2 * hidden)),
            "k": ("midlayer.self_attn.k_proj", (kv_rows, 2 * hidden)),
            "v": ("midlayer.self_attn.v_proj", (kv_rows, 2 * hidden)),
            "o": ("midlayer.self_attn.o_proj", (hidden, out_rows)),
            "gate": ("midlayer.mlp.gate_proj", (wide, hidden)),
            "up": ("midlayer.mlp.up_proj", (wide, hidden)),
            "down": ("midlayer.mlp.down_proj", (hidden, wide)),
            "head": ("lm_head", (config.draft_vocab_size, hidden)),
        }
        norms = {
            "input_norm": "midlayer.input_layernorm",
            "hidden_norm": "midlayer.hidden_norm",
            "ffn_norm": "midlayer.post_attention_layernorm",
            "norm": "norm",
        }
        specs = {
            part: TensorSpec(f"{name}.weight", shape, "matrix", "")
            for part, (name, shape) in matrices.items()
        }
        specs |= {part: TensorSpec(f"{name}.weight", (hidden,), "exact", "") for part, name in norms.items()}
        if attention.project.bias:
            rows = {"q": out_rows, "k": kv_rows, "v": kv_rows}
            specs |= {
                f"{part}_bias": TensorSpec(f"midlayer.self_attn.{part}_proj.bias", (count,), "exact", "")
                for part, count in rows.items()
            }
        if self.has_embedding:
            specs["embedding"] = TensorSpec("embed_tokens.weight", (config.vocab_size, hidden), "matrix", "")
        return specs

    def target_tokens(self) -> I32:
        """The target's token of each entry of the reduced vocabulary."""
        size = self.config.draft_vocab_size
        tokens = np.arange(size, dtype=np.int64)
        if "d2t" in self.tensors:
            tokens += self.tensors.integers("d2t", (size,))
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ModelLoadError(
                f"{self.directory}: d2t names token {tokens.max()}, expected tokens below the vocab_size "
                f"{self.config.vocab_size}; the file is damaged, download it again"
            )
        return tokens.astype(np.int32)


class Eagle3Head:
    """A loaded head with its operators; keys and values are in a cache of the caller's."""

    def __init__(self, files: Eagle3Files, pool: ops.ThreadPool, embed: ops.Embedding) -> None:
        """embed: the target's embedding, for a head without one."""
        weights, config = files.weights, files.config
        attention, where = config.attention, str(files.directory)
        hidden, eps = attention.hidden_size, attention.eps
        self.config = config
        self._embed = (
            ops.Embedding(pool, weights.checked(pool, "embedding")) if files.has_embedding else embed
        )
        self._fc = _linear(pool, weights.packed(pool, where, "fc"))
        o = weights.matrix("o")
        # The attention's output is as wide as its input: the half beside the embedding gets zeros.
        nothing = WeightMatrix(np.zeros_like(o.data), o.format, o.columns, o.scales)
        self._attention = ops.Decoder(
            [
                ops.Gqa(
                    pool,
                    layer=0,
                    heads=attention.project.cpu(attention.heads),
                    project=attention.linear.cpu(weights, pool, where)
                    | {"norm": np.full(2 * hidden, _SCALE, np.float32), "eps": _NO_NORM},
                    rotation=Rotation().cpu(),
                    scores=attention.scores.of(attention.head_dim).cpu(weights),
                    out={"weight": ops.PackedMatrix(pool, [nothing, o])},
                )
            ]
        )
        ffn = ops.DenseFfn(
            pool,
            norm_weight=weights.vector("ffn_norm"),
            gate=weights.packed(pool, where, "gate"),
            up=weights.packed(pool, where, "up"),
            down=weights.packed(pool, where, "down"),
            eps=eps,
            activation="silu",
        )
        self._ffn = ops.Decoder([ffn])
        self._norms = weights.vector("input_norm"), weights.vector("hidden_norm")
        self._head = ops.LmHead(pool, weights.vector("norm"), weights.packed(pool, where, "head"), eps)
        self._rope = RopeTable(config.rope, config.rope_dim, config.max_positions)
        self.target_tokens = files.target_tokens()

    def fused(self, states: F32) -> F32:
        """State [T, hidden] of the target's three hidden states [T, 3 * hidden], lowest layer first."""
        fused = np.empty((len(states), self.config.attention.hidden_size), np.float32)
        self._fc.forward(np.ascontiguousarray(states), fused)
        return fused

    def forward(
        self,
        tokens: Seq[int],
        states: F32,
        positions: I32,
        sequences: I32,
        tables: I32,
        cache: ops.StateCache,
    ) -> F32:
        """States [T, hidden] after `tokens`, from those before them. Writes keys and values.

        Args:
            positions, sequences: of each token, [T]. tables: block table of each sequence.
        """
        hidden, eps = self.config.attention.hidden_size, self.config.attention.eps
        both = np.empty((len(states), 2 * hidden), np.float32)
        embedded = np.empty((len(states), hidden), np.float32)
        self._embed.forward(np.asarray(tokens, np.int32), embedded)
        both[:, :hidden] = _normed(embedded, self._norms[0], eps)
        normed = both[:, hidden:] = _normed(states, self._norms[1], eps)
        residual = normed if self.config.norms_before_residual else states
        lengths = np.zeros(len(positions), np.int32)
        cos, sin = self._rope.rows(positions, lengths)
        attended = both.copy()
        self._attention.forward(attended, ops.AttentionBatch(positions, sequences, tables, cos, sin), cache)
        out = np.ascontiguousarray(residual + (attended - both)[:, hidden:])
        self._ffn.forward(out, ops.AttentionBatch(positions, sequences, tables, cos, sin), cache)
        return out

    def logits(self, states: F32) -> F32:
        """Logits [R, reduced vocabulary] after the tokens that these states follow."""
        logits = np.empty((len(states), self.config.draft_vocab_size), np.float32)
        self._head.forward(np.ascontiguousarray(states), logits)
        return logits


def _linear(pool: ops.ThreadPool, matrix: ops.PackedMatrix) -> ops.LmHead:
    return ops.LmHead(pool, np.full(matrix.columns, _SCALE, np.float32), matrix, _NO_NORM)


def _normed(rows: F32, weight: F32, eps: float) -> F32:
    found: F32 = rows / np.sqrt((rows * rows).mean(1, keepdims=True) + np.float32(eps)) * weight
    return found
