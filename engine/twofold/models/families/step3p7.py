"""Step-3.5 and 3.7 Flash, their text: a gate per head, other query heads with a window, sigmoid router.

Reference: transformers `models/step3p7`, whose text part Step-3.5-Flash equals. Published files list settings by layer,
layers that predict further tokens included; `by_kind` reads those. Gate and up of some layers have a bound
(`swiglu_limits`; `swiglu_limits_shared` of shared experts and dense layers).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.attention.selection import Window
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json, decoder_layers
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.decoder import FULL, SLIDING, Decoder, TextPart
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata, frequency_factors
from twofold.models.keys import Settings, of_gguf
from twofold.weights.json_file import Fields


def _heads(settings: Settings, layer: int, attention: Gqa) -> Gqa:
    heads = settings.fields.optional_integer("num_sliding_attention_heads", minimum=1)
    return (
        replace(attention, num_heads=heads) if heads and isinstance(attention.select, Window) else attention
    )


_DECODER: Final = Decoder(
    "Step-3.5 and 3.7 Flash",
    "step3p5",
    only={"mlp_bias": (False, None), "use_bidirectional_attention": (False, None)},
    attention={"norms": HeadNorms(), "gate": Gate("g_proj", "head"), "zero_centred": True},
    of_layer=_heads,
    rotated_share=1.0,
    dense={"zero_centred": True},
    router={
        "score": "sigmoid", "bias": True, "renormalise": True, "zero_centred": True,
    },
    renamed=(
        ("*.moe.gate.weight", "*.mlp.gate.weight"), ("*.moe.router_bias", "*.mlp.gate.e_score_correction_bias"),
        ("*.moe.gate_proj.weight", "*.mlp.experts.gate_proj"), ("*.moe.up_proj.weight", "*.mlp.experts.up_proj"),
        ("*.moe.down_proj.weight", "*.mlp.experts.down_proj"), ("*.share_expert.", "*.mlp.shared_experts."),
    ),
    text=TextPart(
        (("model.language_model.", "model."),),
        ("vision_model.*", "vit_large_projector.*", "model.vision_model.*", "model.multi_modal_projector.*"),
    ),
)  # fmt: skip
_FACTORS: Final = "rope_frequency_factors"
"""Key of the factors in a GGUF file's rope_freqs.weight, of which layers with full attention have the first ones."""
_ALIASES: Final = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok", "share_expert_dim": "shared_expert_intermediate_size",
    "share_expert_dims": "shared_expert_intermediate_size",
}  # fmt: skip


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    text = fields.section("text_config")
    data = fields.data
    found = by_kind(text) if text is not None else by_kind(fields)
    settings = fields.with_data(data | {"text_config": found} if text is not None else found)
    config = decoder_layers.parse_config(_DECODER, settings, generation)
    if fields.data.get(_FACTORS):
        factors = _numbers(fields, _FACTORS, config.rope_dim // 2, "rotated pairs")
        rope = replace(config.rope, frequency_factors=tuple(factor or 1.0 for factor in factors))
        config = replace(config, rope=rope)
    routed, shared = (
        _numbers(text or fields, f"swiglu_limits{part}", config.num_layers, "layers")
        for part in ("", "_shared")
    )

    def limited(block: Block) -> Block:
        if isinstance(block, RoutedExperts):
            return replace(block, limit=routed[block.layer])
        return (
            replace(block, limit=shared[block.layer])
            if isinstance(block, SharedExperts | DenseFfn)
            else block
        )

    return replace(config, layers=tuple(tuple(map(limited, layer)) for layer in config.layers))


def _numbers(fields: Fields, key: str, count: int, of: str) -> list[float]:
    """A number for each of the first `count` of these; 0: none."""
    numbers = fields.data.get(key) or [0.0] * count
    if not isinstance(numbers, list) or len(numbers) < count:
        raise fields.error(key, numbers, f"a number or null for each of {count} {of}")
    alone = [Fields(fields.where, {key: number}) for number in numbers[:count]]
    return [each.number(key, 0.0) for each in alone]


def by_kind(fields: Fields) -> dict[str, Any]:
    """Settings by kind of layer, where the file lists them by layer."""
    layers = config_json.num_layers_of(fields.defaulting(defaults_of(_DECODER.model_type)))
    data = {_ALIASES.get(key, key): value for key, value in fields.data.items()}
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(data.get(key), list):
            data[key] = data[key][:layers]
    if data.get("mlp_layer_types") is None and (listed := data.get("moe_layers_enum")) is not None:
        sparse = {int(item) for item in str(listed).strip("[]").split(",") if item.strip().isdigit()}
        data["mlp_layer_types"] = ["sparse" if n in sparse else "dense" for n in range(layers)]
    kinds = data.get("layer_types") or [FULL] * layers
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise fields.error("layer_types", kinds, "a kind for each layer")
    own = fields.section("attention_other_setting")
    of_layer = fields.section("per_layer_config")
    if own is not None:
        data.setdefault("num_sliding_attention_heads", own.optional_integer("num_attention_heads"))
    elif of_layer is not None and SLIDING in kinds:
        first = of_layer.section(str(kinds.index(SLIDING)))
        if first is not None:
            data["num_sliding_attention_heads"] = first.optional_integer("num_attention_heads")
    return data | {"rope_parameters": _rotations(fields, kinds)}


def _rotations(fields: Fields, kinds: list[str]) -> dict[str, Any]:
    """A section of `rope_parameters` for each kind of layer."""
    sections = fields.data.get("rope_parameters") or {}
    if isinstance(sections, dict) and all(isinstance(sections.get(kind), dict) for kind in kinds):
        return sections
    found: dict[str, Any] = {}
    for kind in set(kinds):
        found[kind] = {"rope_theta": _of(fields, "rope_theta", kinds.index(kind), 10_000.0)}
        found[kind]["partial_rotary_factor"] = _of(fields, "partial_rotary_factors", kinds.index(kind), 1.0)
    if FULL in found and (scaling := fields.section("rope_scaling")) is not None:
        found[FULL] |= scaling.data
    return found


def _of(fields: Fields, key: str, layer: int, default: float) -> Any:
    """The value of a layer, from a list or one number for all."""
    value = fields.data.get(key)
    if isinstance(value, list):
        if len(value) <= layer:
            raise fields.error(key, value, "a number for each layer")
        return value[layer]
    return default if value is None else value


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "step35" in config.json's format. Raises ModelLoadError naming file and key.

    As in llama.cpp, layers with full attention rotate half of each head, and the scores are sigmoids.
    """
    fields, layers = metadata.fields, range(metadata.num_layers)
    slides = metadata.of_layers("attention.sliding_window_pattern")[: metadata.num_layers]
    heads, kv_heads = (metadata.of_layers(f"attention.head_count{part}", minimum=1) for part in ("", "_kv"))
    by_kind = {bool(slides[n]): heads[n] for n in layers}
    if any(heads[n] != by_kind[bool(slides[n])] or kv_heads[n] != kv_heads[0] for n in layers):
        raise fields.error("attention.head_count", heads[:8], "one number for each kind of layer")
    head_dim = fields.integer("attention.key_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.only(key, head_dim)
    metadata.expect_score("sigmoid")
    rope = metadata.rope_parameters()
    theta = fields.number("rope.freq_base_swa", rope["rope_theta"], above=True)
    return {
        "model_type": "step3p5",
        "values_of_gguf": True,
        "num_attention_heads": by_kind.get(False, heads[0]),
        "num_sliding_attention_heads": by_kind.get(True),
        "num_key_value_heads": kv_heads[0],
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in metadata.file.tensors,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": [SLIDING if slide else FULL for slide in slides],
        "mlp_layer_types": ["sparse" if metadata.has_gate(n) else "dense" for n in layers],
        "rope_parameters": {
            FULL: rope | {"partial_rotary_factor": 0.5},
            SLIDING: {"rope_theta": theta, "partial_rotary_factor": 1.0},
        },
        "swiglu_limits": _limits_of_file(metadata, "swiglu_clamp_exp"),
        "swiglu_limits_shared": _limits_of_file(metadata, "swiglu_clamp_shexp"),
        **metadata.experts(),
        **of_gguf(fields, "shared_expert_intermediate_size", "routed_scaling_factor", "intermediate_size"),
        _FACTORS: list(frequency_factors(metadata.file, head_dim)),
    }


def _limits_of_file(metadata: GgufMetadata, key: str) -> list[Any] | None:
    """Bounds by layer, of a list or of one number for all."""
    value = metadata.file.fields.get(f"{metadata.file.fields['general.architecture']}.{key}")
    if value is None:
        return None
    values: list[Any] = np.ravel(value).tolist()
    return values * metadata.num_layers if len(values) == 1 else values
