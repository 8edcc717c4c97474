"""`ModelConfig`: a model's configuration, parsed and validated from config.json and generation_config.json.

Each family translates its own field names (`qwen3_moe.py`, `mixtral.py`) and composes blocks; fields common to all
families are read here. The configuration holds no weights and no behaviour beyond derived figures.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block, ExpertBlock, Pages, Record, RoutedShape
from twofold.blocks.head import Embedding, Head
from twofold.blocks.rope import ROPE_KINDS, RopeConfig
from twofold.models.quantization import Quantization, read_quantization
from twofold.weights.json_file import Fields, read_json_object
from twofold.weights.schemes import modelopt

# Far above any real model; these keep a damaged config.json from requesting a plan of a billion tensors.
MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 65_535

CacheDType = Literal["float32", "bfloat16", "q8", "fp8"]
WeightDType = Literal["float32", "bfloat16", "float16"]
WEIGHT_DTYPES: Final[tuple[WeightDType, ...]] = ("float32", "bfloat16", "float16")


B = TypeVar("B", bound=Block)


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
    """Configuration common to decoder-only MoE transformers, and the blocks of this one."""

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
        """Maximum tokens of a sequence (prompt and output together).

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
        """Shape of the experts, the same in every layer that has any."""
        blocks = (block for layer in self.layers for block in layer)
        return next(block.routed for block in blocks if isinstance(block, ExpertBlock))

    def blocks_of(self, kind: type[B]) -> list[B]:
        """The blocks of one kind, for a family that writes its configuration."""
        return [block for layer in self.layers for block in layer if isinstance(block, kind)]

    @property
    def num_experts(self) -> int:
        return self.routed.num_experts

    @property
    def top_k(self) -> int:
        return self.routed.top_k

    def cache_dtype(self, asked: str) -> CacheDType:
        """KV cache type on the CPU for a value of --kv-cache-dtype."""
        if asked == "auto":
            return "bfloat16" if self.dtype == "bfloat16" else "float32"
        names: dict[str, CacheDType] = {
            "float32": "float32",
            "bfloat16": "bfloat16",
            "q8": "q8",
            "fp8": "fp8",
            "fp8_e4m3": "fp8",
        }
        return names[asked]

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
        if not self.moe_layers:
            problems.append("no layer has experts; Twofold runs mixture-of-experts models only")
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


def read_config_json(directory: Path) -> Fields:
    """The fields of `directory`/config.json. Raises ModelLoadError, also for a missing directory."""
    if not directory.exists():
        raise ModelLoadError(f"{directory}: no such model directory; check the path or download the model")
    if not directory.is_dir():
        raise ModelLoadError(
            f"{directory}: is a file, expected a GGUF file or a directory with config.json and *.safetensors"
        )
    path = directory / "config.json"
    gguf = [] if path.exists() else sorted(found.name for found in directory.glob("*.gguf"))
    if gguf:
        raise ModelLoadError(
            f"{directory}: holds {gguf[0]} and no config.json; give the path of that file as the model"
        )
    fields = Fields(str(path), read_json_object(path, "the model's configuration"))
    read_quantization(fields)
    return fields


def directory_quantization(directory: Path) -> Quantization:
    """Quantisation in a directory's config.json, beside the text part or inside it. Raises ModelLoadError as
    loading."""
    fields = read_config_json(directory)
    text = fields.section("text_config")
    found = read_quantization(fields)
    if text is not None and found == Quantization({}):
        found = read_quantization(text)
    if found == Quantization({}) and (scheme := modelopt.beside(directory)) is not None:
        return Quantization({}, scheme)
    return found


def architecture_name(fields: Fields) -> str:
    """The first of config.json's `architectures`."""
    _, names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", names, 'a list such as ["Qwen3MoeForCausalLM"]')
    return names[0]


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """generation_config.json, or empty defaults if the file is missing."""
    path = directory / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    fields = Fields(str(path), read_json_object(path, "the model's generation defaults"))
    return GenerationDefaults(
        do_sample=fields.boolean("do_sample", False),
        temperature=fields.optional_number("temperature"),
        top_p=fields.optional_number("top_p", maximum=1.0, above=True),
        top_k=fields.optional_integer("top_k"),
        min_p=fields.optional_number("min_p", maximum=1.0),
        repetition_penalty=fields.optional_number("repetition_penalty", above=True),
        eos_token_ids=fields.integers("eos_token_id"),
    )


def read_dtype(fields: Fields) -> WeightDType:
    """Weight type from `dtype` (transformers 5) or `torch_dtype`; float32 if the config has neither."""
    name, value = fields.get(("dtype", "torch_dtype"))
    if value is None:
        return "float32"
    for known in WEIGHT_DTYPES:
        if value == known:
            return known
    raise fields.error(name, value, f"one of {', '.join(WEIGHT_DTYPES)}")


def pages_of(layer: tuple[Block, ...]) -> list[Pages]:
    """A layer's per-token state."""
    return [kept for block in layer for kept in block.state if isinstance(kept, Pages)]


def repeat_layers(
    num_layers: int, blocks: Callable[[int], tuple[Block, ...]]
) -> tuple[tuple[Block, ...], ...]:
    """The layers; `blocks` returns the blocks of a layer index."""
    return tuple(tuple(replace(block, layer=layer) for block in blocks(layer)) for layer in range(num_layers))


def read_outline(
    fields: Fields,
    generation: GenerationDefaults,
    layers: tuple[tuple[Block, ...], ...],
    *,
    eps: float,
    rope: RopeConfig,
    rope_dim: int,
    max_position_embeddings: int,
) -> ModelConfig:
    """A family's layers with the settings common to every config.json."""
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    tied = fields.boolean("tie_word_embeddings", False)
    return ModelConfig(
        architecture=architecture_name(fields),
        embedding=Embedding(vocab_size, hidden_size, tied),
        layers=layers,
        head=Head(vocab_size, hidden_size, eps, tied),
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        rope_dim=rope_dim,
        dtype=read_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        eos_token_ids=generation.eos_token_ids or fields.integers("eos_token_id"),
        generation=generation,
    )


def read_activation(fields: Fields) -> None:
    """Raises ModelLoadError for an activation other than SiLU, the only one the kernels compute here."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", activation, "'silu', the only supported activation")


def read_layer_types(
    fields: Fields, num_layers: int, kind: str, usual: Callable[[int], bool] | None = None
) -> set[int]:
    """The layers that `layer_types` lists as this kind, others being "full_attention"; without the list, `usual`."""
    kinds = fields.data.get("layer_types")
    if kinds is None and usual is not None:
        return set(filter(usual, range(num_layers)))
    known = (kind, "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(said not in known for said in kinds):
        raise fields.error(
            "layer_types", kinds, f"{known[0]!r} or {known[1]!r} for each of {num_layers} layers"
        )
    return {layer for layer, said in enumerate(kinds) if said == kind}


def rotary_share(rotary_dim: int, head_dim: int) -> float:
    """The `partial_rotary_factor` that `read_rotary_dim` converts to `rotary_dim`."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1)


def read_rotary_dim(fields: Fields, head_dim: int, default: float) -> int:
    """Rotated elements of a head, from the share in `partial_rotary_factor`."""
    section = fields.section(("rope_parameters", "rope_scaling"))
    said = None if section is None else section.optional_number("partial_rotary_factor", maximum=1.0)
    share = said if said is not None else fields.number("partial_rotary_factor", default, maximum=1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor", share, f"an even number of the {head_dim} elements of a head"
        )
    return rotary_dim


def read_rope(
    fields: Fields, *, default_theta: float, max_position_embeddings: int, partial: bool = False
) -> RopeConfig:
    """RoPE settings, from `rope_parameters` (transformers 5: theta inside) or `rope_scaling` with `rope_theta`.

    partial: the family rotates a share of each head (`read_rotary_dim`).
    """
    theta = fields.number("rope_theta", default_theta, above=True)
    section = fields.section(("rope_parameters", "rope_scaling"))
    if section is None:
        return RopeConfig(theta=theta)
    if any(isinstance(value, dict) for value in section.data.values()):
        raise ModelLoadError(
            f"{section.where}: settings per layer type are not supported; use one set for all layers"
        )
    theta = section.number("rope_theta", theta, above=True)
    share = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        raise section.error("partial_rotary_factor", share, "1.0, the only supported value")
    name = section.text(("rope_type", "type"), "default")
    kind = next((known for known in ROPE_KINDS if known == name), None)
    if kind is None:
        raise section.error("rope_type", name, f"one of {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind=kind, theta=theta, factor=section.number("factor", minimum=1.0))
    original = section.integer("original_max_position_embeddings", max_position_embeddings)
    if kind == "llama3":
        low = section.number("low_freq_factor", 1.0, above=True)
        return RopeConfig(
            kind, theta, section.number("factor", minimum=1.0), original, low_freq_factor=low,
            high_freq_factor=section.number("high_freq_factor", 4.0, minimum=low),
        )  # fmt: skip
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=_yarn_factor(section, max_position_embeddings / original),
        original_max_position_embeddings=original,
        attention_factor=section.optional_number("attention_factor", above=True),
        beta_fast=section.number("beta_fast", 32.0, above=True),
        beta_slow=section.number("beta_slow", 1.0, above=True),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.boolean("truncate", True),
    )


def _yarn_factor(section: Fields, derived: float) -> float:
    """YaRN factor as transformers reads it: the key is required; null with an original length uses their ratio."""
    stated = section.get("original_max_position_embeddings")[1] is not None
    if stated and "factor" in section.data:
        return section.number("factor", derived, minimum=1.0)
    return section.number("factor", minimum=1.0)
