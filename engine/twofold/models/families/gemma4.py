"""Gemma 4, its text (E2B, E4B, 26B-A4B, 31B): windows in turn with full attention, norms after blocks too.

Reference: transformers `models/gemma4`, defaults those of `Gemma4TextConfig`. Layers with full attention have heads of
another size, turn a share of their pairs, and may have no v_proj; GGUF files omit missing parts. Small models are
dense, give every layer an input of its own, and their last layers read keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import Window
from twofold.blocks.block import Block, changed
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.layer_input import LayerInput, LayerInputs
from twofold.blocks.post_norm import PostNorm
from twofold.blocks.rope import RopeConfig
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata, frequency_factors
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PROPORTIONAL: Final = "proportional"
_ROPES: Final = {_SLIDING: RopeConfig(), _FULL: RopeConfig(_PROPORTIONAL, 1e6, share=0.25)}
_VISION: Final = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
_NOT_SHARED: Final = (
    "model.layers.{}.self_attn.[kv]_proj.*", "model.layers.{}.self_attn.[kv]_norm.*", "blk.{}.attn_k.*",
    "blk.{}.attn_v.*", "blk.{}.attn_k_norm.*",
)  # fmt: skip
"""Tensors of a layer that reads another's keys and values; checkpoints hold some."""
_NEVER_TURNS: Final = 1e20
"""Frequency factor from which on a GGUF file means an unrotated pair."""


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    if config_json.architecture_name(fields) == "Gemma4ForConditionalGeneration":
        config = parse_config(text_fields(fields, "Gemma4ForCausalLM"), generation)
        patterns = (f"model.{part}.*" for part in _VISION)
        return without_images(config, (("model.language_model.", "model."),), *patterns)
    fields = fields.defaulting(defaults_of("gemma4_text"))
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", None, "vision")
    num_layers = config_json.num_layers_of(fields)
    windows = config_json.read_layer_types(fields, _SLIDING, lambda n: (n + 1) % 6 != 0) - {num_layers - 1}
    attention = replace(config_json.read_attention(fields), norms=HeadNorms(v=True), scores=Scores(1.0))
    bidirectional = fields.data.get("use_bidirectional_attention") == "vision"
    sliding = replace(attention, select=Window(fields.integer("sliding_window"), bidirectional=bidirectional))
    full = _read_full(fields, attention, {*range(num_layers)} - windows)
    num_shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    first_shared = num_layers - num_shared
    sources = {n in windows: n for n in range(first_shared)}  # the last layer of each kind
    if len(sources) < len({n in windows for n in range(num_layers)}):
        raise fields.error("num_kv_shared_layers", num_shared, "so few that a layer of each kind is left")
    hidden, eps, wide = attention.hidden_size, attention.eps, fields.integer("intermediate_size")
    dense = DenseFfn(0, hidden, wide, eps, norm="pre_feedforward_layernorm", activation="gelu_tanh")
    wider = (
        replace(dense, intermediate_size=2 * wide) if fields.boolean("use_double_wide_mlp", False) else dense
    )
    mixture = _read_mixture(fields, attention) if fields.boolean("enable_moe_block", False) else ()
    size, norm = (
        fields.integer("hidden_size_per_layer_input", 0, minimum=0),
        partial(PostNorm, 0, hidden, eps),
    )
    inputs = _layer_inputs(fields, num_layers, size, attention)

    def layer(n: int) -> tuple[Block, ...]:
        own = sliding if n in windows else full
        blocks = (
            own if n < first_shared else changed(own, {"project": {"kv_layer": sources[n in windows]}}),
            norm("post_attention_layernorm", "post_attention_norm"),
            dense if n < first_shared else wider,
            *mixture,
            norm("post_feedforward_layernorm", "post_ffw_norm", over=1 + len(mixture), scalar=size == 0),
        )
        of_input = LayerInput(0, hidden, size), norm("post_per_layer_input_norm", "post_norm", scalar=True)
        return blocks if size == 0 else (*blocks, *of_input)

    rope, of_full = (_read_rope(fields, kind, usual) for kind, usual in _ROPES.items())
    config = config_json.read_model(fields, generation, attention, layer, rope)
    embedding = replace(config.embedding, scale=hidden**0.5, layer_inputs=inputs if size else None)
    unread = (name.format(n) for n in range(max(0, first_shared), num_layers) for name in _NOT_SHARED)
    return replace(
        config,
        further_rotations=((of_full, full.head_dim),),
        head=replace(config.head, softcap=fields.optional_number("final_logit_softcapping", above=True)),
        embedding=embedding,
        ignored=(*config.ignored, *unread),
    )


def _layer_inputs(fields: Fields, num_layers: int, size: int, attention: Gqa) -> LayerInputs:
    vocabulary = fields.integer("vocab_size_per_layer_input")
    padding = fields.optional_integer("pad_token_id", minimum=0) or 0
    return LayerInputs(
        num_layers, size, vocabulary, attention.hidden_size, attention.eps, padding_token=padding
    )


def _read_full(fields: Fields, attention: Gqa, layers: set[int]) -> Gqa:
    """Attention of the layers without a window.

    Published files have `global_head_dim`; transformers writes the sizes of each layer that has its own.
    """
    shared = fields.boolean("attention_k_eq_v", False)
    own = fields.section("per_layer_config")
    parts: dict[str, Any] = {"project": {"keys_are_values": shared}, "rotation": Rotation(1)}
    if own is None:
        head_dim = fields.integer("global_head_dim")
        kv_heads = fields.optional_integer("num_global_key_value_heads", minimum=1) if shared else None
    elif not own.data:  # as transformers writes it if all layers have the same heads
        return changed(attention, parts)
    else:
        first = own.section(str(min(layers)))
        if first is None or own.data != {str(layer): first.data for layer in layers}:
            raise fields.error(
                "per_layer_config", own.data, "one for all layers with full attention and no others"
            )
        other = next((key for key in first.data if key not in ("head_dim", "num_key_value_heads")), None)
        if other is not None:
            raise first.error(other, first.data[other], "no key but head_dim and num_key_value_heads")
        head_dim = first.integer("head_dim", attention.head_dim)
        kv_heads = first.optional_integer("num_key_value_heads", minimum=1)
    kv_heads = kv_heads or attention.num_kv_heads
    return changed(attention, {"head_dim": head_dim, "num_kv_heads": kv_heads, **parts})


def _read_rope(fields: Fields, kind: str, usual: RopeConfig) -> RopeConfig:
    """Rotation of layers of `kind`, from their section of `rope_parameters`; `usual` without one."""
    sections = fields.section("rope_parameters")
    section = None if sections is None else sections.section(kind)
    if section is None:
        return usual
    if section.text("rope_type", "default") != _PROPORTIONAL:
        defaults = {**fields.defaults, "rope_theta": usual.theta}
        positions = {"max_position_embeddings": fields.integer("max_position_embeddings")}
        return config_json.read_rope(
            Fields(section.where, {"rope_parameters": section.data, **positions}, defaults)
        )
    return RopeConfig(
        _PROPORTIONAL,
        section.number("rope_theta", usual.theta, above=True),
        section.number("factor", 1.0, above=True),
        share=section.number("partial_rotary_factor", 1.0, maximum=1.0),
    )


def _read_mixture(fields: Fields, attention: Gqa) -> tuple[Block, ...]:
    """Blocks after the dense part: norm of its output, and experts in parallel with it, with norms of their own."""
    norm = partial(PostNorm, 0, attention.hidden_size, attention.eps)
    router, experts = config_json.read_mixture(fields, attention)
    router = replace(
        router,
        renormalise=True,
        modules=("router",),
        gates=("proj",),
        gate_scaled=True,
        norm="pre_feedforward_layernorm_2",
        gguf_norm="pre_ffw_norm_2",
        expert_scaled=True,
    )
    return (
        norm("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        router,
        replace(experts, modules=("",), activation="gelu_tanh"),
        norm("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    )


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "gemma4" in config.json's format. Raises ModelLoadError naming file and key."""
    fields, tensors, layers = metadata.fields, metadata.file.tensors, range(metadata.num_layers)
    num_shared = fields.integer("attention.shared_kv_layers", 0, minimum=0, maximum=metadata.num_layers - 1)
    with_kv, wide = layers[: len(layers) - num_shared], metadata.of_layers("feed_forward_length", minimum=1)
    double = num_shared > 0 and wide[metadata.num_layers - 1] == 2 * wide[0]
    if any(wide[n] != (1 + (double and n not in with_kv)) * wide[0] for n in layers):
        raise fields.error("feed_forward_length", wide[:8], "one size, or twice it in layers that share keys")
    slides = metadata.of_layers("attention.sliding_window_pattern")
    kv_heads = metadata.of_layers("attention.head_count_kv", minimum=1)
    head_dim, full_dim = fields.integer("attention.key_length_swa"), fields.integer("attention.key_length")
    for suffix, dim in (("_swa", head_dim), ("", full_dim)):
        fields.only(f"attention.value_length{suffix}", dim)
        fields.only(f"rope.dimension_count{suffix}", dim)
    shared = [f"blk.{n}.attn_v.weight" not in tensors for n in layers]
    kinds = {(bool(slides[n]), kv_heads[n], shared[n] and not slides[n]) for n in with_kv}
    by_kind = {slide: (heads, is_shared) for slide, heads, is_shared in kinds}
    if len(kinds) != len(by_kind) or slides[metadata.num_layers - 1] or False not in by_kind:
        raise ModelLoadError(
            f"{fields.where}: attention is not one of two kinds, of which the last layer's is full; give the "
            "Hugging Face checkpoint instead"
        )
    table = tensors.get("per_layer_token_embd.weight")
    own = {"head_dim": full_dim, "num_key_value_heads": by_kind[False][0]}
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": double,
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": table.shape[0] if table is not None else 1,
        "enable_moe_block": metadata.has_gate(0),
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": by_kind.get(True, by_kind[False])[0],
        "head_dim": head_dim,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": [_SLIDING if slides[n] else _FULL for n in layers],
        "attention_k_eq_v": by_kind[False][1],
        "per_layer_config": {str(n): own for n in layers if not slides[n]},
        "rope_parameters": {
            _SLIDING: {"rope_theta": fields.number("rope.freq_base_swa", 10_000.0, above=True)},
            _FULL: _full_rope(metadata, full_dim),
        },
        "intermediate_size": wide[0],
        **(metadata.experts(top_k="top_k_experts") if metadata.has_gate(0) else {}),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping", above=True),
    }


def _full_rope(metadata: GgufMetadata, dim: int) -> dict[str, Any]:
    """Rotation of layers with full attention: frequency factors that keep pairs from turning are a rotated share."""
    settings = metadata.rope_parameters(1e6)
    factors = np.array(frequency_factors(metadata.file, dim))
    turning = int(np.sum(factors == 1.0))
    if turning == len(factors):
        return settings
    if not np.all(factors[:turning] == 1.0) or not np.all(factors[turning:] >= _NEVER_TURNS):
        raise ModelLoadError(
            f"{metadata.file.path}: rope_freqs.weight holds factors other than 1 and, after them, at least "
            f"{_NEVER_TURNS:g}, which alone are supported; give the Hugging Face checkpoint instead"
        )
    share = config_json.rotary_share(2 * turning, dim)
    return {"rope_type": _PROPORTIONAL, "rope_theta": settings["rope_theta"], "partial_rotary_factor": share}
