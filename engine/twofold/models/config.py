"""`ModelConfig`: a model's configuration, independent of the file that it was read from (`config_json.py`).

Each family composes its blocks (`families/`). It holds no weights and no behaviour beyond derived figures.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast, get_args

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block, ExpertBlock, Pages, Record, RoutedShape
from twofold.blocks.head import Embedding, Head
from twofold.blocks.rope import RopeConfig

# Far above any real model; these keep a damaged config.json from requesting a plan of a billion tensors.
MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 65_535

CacheDType = Literal["float32", "bfloat16", "q8", "fp8"]
WeightDType = Literal["float32", "bfloat16", "float16"]
WEIGHT_DTYPES: Final[tuple[WeightDType, ...]] = ("float32", "bfloat16", "float16")


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommended sampling settings from generation_config.json; None if not given."""

    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Configuration common to decoder-only transformers, and the blocks of this one."""

    architecture: str
    """The class name in config.json, e.g. "Qwen3MoeForCausalLM"."""
    embedding: Embedding
    layers: tuple[tuple[Block, ...], ...]
    """The blocks of each layer, in execution order."""
    head: Head
    max_position_embeddings: int
    rope: RopeConfig
    rope_dim: int
    """Rotated elements of a head."""
    further_rotations: tuple[tuple[RopeConfig, int], ...] = ()
    """(rope, rope_dim) of layers with another rotation."""
    dtype: WeightDType = "float32"
    """Type of the weights that are not quantised; a KV cache of type "auto" follows it."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    renamed: tuple[tuple[str, str], ...] = ()
    """Replaced name prefixes of a checkpoint: (checkpoint's, ours); with * before both: replaced name parts."""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "rope_freqs.weight")
    """Patterns of ignored tensors: without information, or with values that the configuration has."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Unsupported parts of checkpoints: (description, pattern of their tensors)."""

    context_limit: int | None = None
    """Positions up to which the model is computed exactly, if fewer than it was made for."""
    context_limit_reason: str = ""
    """What ends the context there, for messages."""

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """(rope, rope_dim) pairs, indexed by a block's `rotation`."""
        return ((self.rope, self.rope_dim), *self.further_rotations)

    @property
    def hidden_size(self) -> int:
        return self.embedding.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_context(self) -> int:
        """Maximum tokens of a sequence (prompt and output together), at most `context_limit`."""
        own = self._own_context
        return own if self.context_limit is None else min(own, self.context_limit)

    @property
    def _own_context(self) -> int:
        """Context length that the model was made for.

        Linear scaling changes max_position_embeddings itself. For dynamic NTK it is the length before scaling; YaRN
        keeps that in original_max_position_embeddings. Both extend it by `factor`.
        """
        if self.rope.kind == "dynamic":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(
                self.max_position_embeddings,
                int(self.rope.original_max_position_embeddings * self.rope.factor),
            )
        return self.max_position_embeddings

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, ascending."""
        layers = enumerate(self.layers)
        return tuple(i for i, layer in layers if any(isinstance(block, ExpertBlock) for block in layer))

    @property
    def routed(self) -> RoutedShape:
        """Shape of the experts, the same in every layer that has any; no experts: a dense model."""
        blocks = (block for layer in self.layers for block in layer)
        found = (block.routed for block in blocks if isinstance(block, ExpertBlock))
        return next(found, RoutedShape(0, 0, self.hidden_size, 0))

    @property
    def num_experts(self) -> int:
        return self.routed.num_experts

    @property
    def top_k(self) -> int:
        return self.routed.top_k

    def cache_dtype(self, setting: str) -> CacheDType:
        """KV cache type on the CPU for a value of --kv-cache-dtype."""
        if setting == "auto":
            return "bfloat16" if self.dtype == "bfloat16" else "float32"
        known = (each for each in get_args(CacheDType) if each == setting.removesuffix("_e4m3"))
        return cast(CacheDType, next(known))

    def cache_bytes_per_token(self, dtype: CacheDType) -> int:
        """Cache bytes per token, over all blocks."""
        return sum(
            kept.planes * cache_row_bytes(dtype, kept.elements)
            for layer in self.layers
            for kept in pages_of(layer)
        )

    def cache_planes(self, dtype: CacheDType) -> list[list[tuple[int, int, CacheDType]]]:
        """Cache layout for `ops.StateCache`: for each layer (planes, elements per token, type)."""
        return [[(kept.planes, kept.elements, dtype) for kept in pages_of(layer)] for layer in self.layers]

    @property
    def record_bytes(self) -> list[int]:
        """Bytes of each layer's per-sequence records; a layer without any counts 0."""
        return [
            sum(kept.num_bytes for block in layer for kept in block.state if isinstance(kept, Record))
            for layer in self.layers
        ]

    @property
    def bytes_per_sequence(self) -> int:
        """Record bytes per sequence, independent of its length."""
        return sum(self.record_bytes)

    def without_predictions(self, where: str, count: int) -> ModelConfig:
        """The configuration, with `count` layers after the last ignored: they predict further tokens (MTP). Logs it
        with `where`, the file that defines them. Raises ModelLoadError for more than a model can have."""
        if count > MAX_LAYERS:
            raise ModelLoadError(
                f"{where}: {count} layers that predict further tokens were given; expected {MAX_LAYERS} at most; "
                "fix or replace this file"
            )
        names = [
            f"{prefix}.{self.num_layers + n}.*" for n in range(count) for prefix in ("model.layers", "blk")
        ]
        if names:
            _log.info("%s: multi-token prediction is not run; left out: %s", where, ", ".join(names))
        return replace(self, ignored=(*self.ignored, *names))

    def validate(self, where: str) -> ModelConfig:
        """The configuration itself; raises ModelLoadError if fields contradict one another. `where` is the file to
        name."""
        problems = [problem for layer in self.layers for block in layer for problem in block.problems()]
        if not any(map(pages_of, self.layers)):
            problems.append("no layer has full attention; at least one was expected")
        if any(rope.kind == "dynamic" and dim <= 2 for rope, dim in self.rotations):
            problems.append("dynamic RoPE scaling needs a head_dim of more than 2")
        if any(token >= self.vocab_size for token in self.eos_token_ids):
            problems.append(
                f"eos_token_id {list(self.eos_token_ids)} is outside the vocabulary of {self.vocab_size}"
            )
        for problem in problems:
            raise ModelLoadError(f"{where}: {problem}; fix or replace this file")
        return self


def cache_row_bytes(dtype: CacheDType, elements: int) -> int:
    """Bytes of a row of keys, values or latents: its elements, and with q8 the row's float32 scale."""
    element_bytes = {"float32": 4, "bfloat16": 2, "q8": 1, "fp8": 1}[dtype]
    return element_bytes * elements + (4 if dtype == "q8" else 0)


def pages_of(layer: tuple[Block, ...]) -> list[Pages]:
    """A layer's per-token state."""
    return [kept for block in layer for kept in block.state if isinstance(kept, Pages)]
