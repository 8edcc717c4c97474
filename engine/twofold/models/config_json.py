"""Reader of a model directory's config.json and generation_config.json.

A family's `parse_config` reads its own keys and calls the functions here for what families share. Keys that a family's
files may omit are in the defaults of `Fields`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from twofold.api.errors import ModelLoadError
from twofold.blocks.attention.projections import Projections
from twofold.blocks.block import Block, in_layer
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.gqa import Gqa
from twofold.blocks.head import Embedding, Head
from twofold.blocks.rope import ROPE_KINDS, RopeConfig
from twofold.blocks.router import Router
from twofold.models.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    WEIGHT_DTYPES,
    GenerationDefaults,
    ModelConfig,
    WeightDType,
)
from twofold.models.keys import ALSO
from twofold.models.quantization import Quantization, read_quantization
from twofold.weights.json_file import Fields, read_json_object
from twofold.weights.schemes import modelopt


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
    fields = Fields(str(path), read_json_object(path, "the model's configuration"), also=ALSO)
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
    return replace(generation_defaults(fields, lambda key: key), do_sample=fields.boolean("do_sample", False))


def generation_defaults(fields: Fields, key_of: Callable[[str], str]) -> GenerationDefaults:
    """Sampling settings of `fields`; `key_of` gives their keys there for those of generation_config.json."""
    return GenerationDefaults(
        temperature=fields.optional_number(key_of("temperature")),
        top_p=fields.optional_number(key_of("top_p"), maximum=1.0, above=True),
        top_k=fields.optional_integer(key_of("top_k")),
        min_p=fields.optional_number(key_of("min_p"), maximum=1.0),
        repetition_penalty=fields.optional_number(key_of("repetition_penalty"), above=True),
        eos_token_ids=fields.integers(key_of("eos_token_id")),
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


def num_layers_of(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def read_model(
    fields: Fields,
    generation: GenerationDefaults,
    attention: Gqa,
    layer: Callable[[int], tuple[Block, ...]],
    rope: RopeConfig,
) -> ModelConfig:
    """A family's model that rotates whole heads; `layer` returns the blocks of a layer index."""
    return compose_model(fields, generation, layer, eps=attention.eps, rope=rope, rope_dim=attention.head_dim)


def compose_model(
    fields: Fields,
    generation: GenerationDefaults,
    layer: Callable[[int], tuple[Block, ...]],
    *,
    eps: float,
    rope: RopeConfig,
    rope_dim: int,
) -> ModelConfig:
    """A family's model with the settings common to every config.json; `layer` returns the blocks of a layer index."""
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    tied = fields.boolean("tie_word_embeddings", False)
    return ModelConfig(
        architecture=architecture_name(fields),
        embedding=Embedding(vocab_size, hidden_size, tied),
        layers=tuple(in_layer(layer(n), n) for n in range(num_layers_of(fields))),
        head=Head(vocab_size, hidden_size, eps, tied),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=rope,
        rope_dim=rope_dim,
        dtype=read_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        eos_token_ids=generation.eos_token_ids or fields.integers("eos_token_id"),
        generation=generation,
    )


def read_attention(fields: Fields) -> Gqa:
    """Grouped-query attention from the keys that most families have; the others are the family's to `replace`."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    bias = fields.boolean("attention_bias", False)
    head_dim = fields.optional_integer("head_dim", minimum=1)
    return Gqa(
        layer=0,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.optional_integer("num_key_value_heads", minimum=1) or num_heads,
        head_dim=head_dim or max(1, hidden_size // num_heads),
        eps=fields.number("rms_norm_eps", above=True),
        project=Projections(bias=bias),
        o_bias=bias,
    )


def read_mixture(
    fields: Fields,
    attention: Gqa,
    *,
    intermediate: str = "moe_intermediate_size",
) -> tuple[Router, RoutedExperts]:
    """Softmax router and routed experts, their sizes under these keys; the rest is the family's to `replace`."""
    router = Router(
        layer=0,
        hidden_size=attention.hidden_size,
        num_experts=fields.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=fields.integer("num_experts_per_tok"),
        eps=attention.eps,
        renormalise=fields.boolean("norm_topk_prob", False),
    )
    return router, experts_of(router, fields.integer(intermediate))


def experts_of(router: Router, intermediate_size: int) -> RoutedExperts:
    """The routed experts of `router`."""
    return RoutedExperts(
        layer=0,
        hidden_size=router.hidden_size,
        num_experts=router.num_experts,
        top_k=router.top_k,
        intermediate_size=intermediate_size,
    )


def read_activation(fields: Fields) -> None:
    """Raises ModelLoadError for an activation other than SiLU, the only one the kernels compute here."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", activation, "'silu', the only supported activation")


def read_layer_types(fields: Fields, kind: str, usual: Callable[[int], bool] | None = None) -> set[int]:
    """The layers that `layer_types` lists as this kind, others being "full_attention"; without the list, `usual`."""
    kinds, num_layers = fields.data.get("layer_types"), num_layers_of(fields)
    if kinds is None and usual is not None:
        return set(filter(usual, range(num_layers)))
    known = (kind, "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(each not in known for each in kinds):
        raise fields.error(
            "layer_types", kinds, f"{known[0]!r} or {known[1]!r} for each of {num_layers} layers"
        )
    return {layer for layer, each in enumerate(kinds) if each == kind}


def rotary_share(rotary_dim: int, head_dim: int) -> float:
    """The `partial_rotary_factor` that `read_rotary_dim` converts to `rotary_dim`."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1)


def read_rotary_dim(fields: Fields, head_dim: int, default: float) -> int:
    """Rotated elements of a head, from the share in `partial_rotary_factor`."""
    section = fields.section(("rope_parameters", "rope_scaling"))
    stated = None if section is None else section.optional_number("partial_rotary_factor", maximum=1.0)
    share = stated if stated is not None else fields.number("partial_rotary_factor", default, maximum=1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.error(
            "partial_rotary_factor", share, f"an even number of the {head_dim} elements of a head"
        )
    return rotary_dim


def rope_fields_of(fields: Fields, kind: str) -> Fields:
    """`fields` with the rotation of layers of this kind, if `rope_parameters` has a section for each kind."""
    sections = fields.section(("rope_parameters", "rope_scaling"))
    section = None if sections is None or kind not in sections.data else sections.section(kind)
    if section is None:
        return fields
    return fields.with_data(fields.data | {"rope_parameters": section.data}, section.where)


def read_rope(fields: Fields, *, partial: bool = False, ntk_dim: int | None = None) -> RopeConfig:
    """RoPE settings, from `rope_parameters` (transformers 5: theta inside) or `rope_scaling` with `rope_theta`.

    partial: the family rotates a share of each head (`read_rotary_dim`). ntk_dim: rotated elements of a head, whose
    base a fixed `alpha` stretches (Hunyuan); None: the family has no such key.
    """
    theta, max_positions = fields.number("rope_theta", above=True), fields.integer("max_position_embeddings")
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
    alpha = (
        section.optional_number("alpha", above=True) if ntk_dim is not None and kind == "dynamic" else None
    )
    if alpha is not None and ntk_dim is not None:
        if ntk_dim <= 2:
            raise section.error("alpha", alpha, "none, because heads have no more than two rotated elements")
        return RopeConfig(theta=theta * alpha ** (ntk_dim / (ntk_dim - 2)))
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind=kind, theta=theta, factor=section.number("factor", minimum=1.0))
    original = section.integer("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low = section.number("low_freq_factor", 1.0, above=True)
        high = section.number("high_freq_factor", 4.0, minimum=low)
        factor = section.number("factor", minimum=1.0)
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=_yarn_factor(section, max_positions / original),
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
