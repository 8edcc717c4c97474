"""Llama 4 (Scout, Maverick), its text: chunked attention, every fourth layer without rotation, one expert per token.

Reference: transformers `models/llama4`, defaults those of `Llama4TextConfig`. GGUF files omit llama.cpp's built-in
settings. The router's weight multiplies an expert's input. Norms of queries and keys have no weights and follow the
rotation, so they cancel its scaling, but for their epsilon.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.attention.query_scale import QueryScale
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.selection import AllPositions, Chunk
from twofold.blocks.block import Block
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.rope import preserving_length
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields

_MODULE: Final = "feed_forward"


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig of the text part. Raises ModelLoadError naming the file and the key."""
    if config_json.architecture_name(fields) == "Llama4ForConditionalGeneration":
        config = parse_config(text_fields(fields, "Llama4ForCausalLM"), generation)
        return without_images(config, (("language_model.", ""),), "vision_model.*", "multi_modal_projector.*")
    fields = fields.defaulting(defaults_of("llama4_text"))
    config_json.read_activation(fields)
    attention = replace(config_json.read_attention(fields), rotation=Rotation(neighbours=True))
    turns = _read_rotated(fields)
    normed = fields.boolean("use_qk_norm", True)
    rope, scaling = config_json.read_rope(fields), 1.0
    if normed:
        rope, scaling = preserving_length(rope)
    norms = HeadNorms("unit" if normed else None, eps=attention.eps / scaling**2)
    rotated = replace(attention, norms=norms)
    chunked_layers = config_json.read_layer_types(fields, "chunked_attention", lambda n: turns[n])
    chunk = Chunk(fields.integer("attention_chunk_size"))
    unrotated = replace(attention, rotation=None, scale=_read_temperature(fields))
    mixture, is_moe = _read_mixture(fields, attention), fields.integers("moe_layers")
    if not is_moe:
        step = fields.integer("interleave_moe_layer_step")
        is_moe = tuple(range(step - 1, config_json.num_layers_of(fields), step))
    wide = fields.integer("intermediate_size_mlp")
    dense = DenseFfn(0, attention.hidden_size, wide, attention.eps, module=_MODULE)

    def layer(n: int) -> tuple[Block, ...]:
        own = rotated if turns[n] else unrotated
        own = replace(own, select=chunk if n in chunked_layers else AllPositions())
        return (own, *mixture) if n in is_moe else (own, dense)

    return config_json.read_model(fields, generation, attention, layer, rope)


def _read_rotated(fields: Fields) -> list[bool]:
    """Whether each layer has rotation."""
    num_layers, interval = config_json.num_layers_of(fields), fields.integer("no_rope_layer_interval")
    listed = fields.integers("no_rope_layers")
    if listed and len(listed) < num_layers:
        raise fields.error("no_rope_layers", list(listed), f"0 or 1 for each of {num_layers} layers")
    return [bool(listed[n] if listed else (n + 1) % interval) for n in range(num_layers)]


def _read_temperature(fields: Fields) -> QueryScale | None:
    """Temperature of layers without rotation."""
    fields.only("attn_temperature_tuning", True, False, 4)  # 4: as first published
    if not fields.data.get("attn_temperature_tuning", True):
        return None
    return QueryScale(fields.number("floor_scale", above=True), fields.number("attn_scale"))


def _read_mixture(fields: Fields, attention: Gqa) -> tuple[Block, ...]:
    router, experts = config_json.read_mixture(fields, attention, intermediate="intermediate_size")
    return (
        replace(router, renormalise=False, score="sigmoid", modules=(_MODULE,), gates=("router",)),
        SharedExperts(0, attention.hidden_size, experts.intermediate_size, f"{_MODULE}.shared_expert"),
        replace(experts, modules=(_MODULE,), transposed=True, weighs_rows=True),
    )


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "llama4" in config.json's format. Raises ModelLoadError naming file and key."""
    fields, layers = metadata.fields, range(metadata.num_layers)
    metadata.expect_score("sigmoid")
    fields.only("attention.sliding_window", defaults_of("llama4_text")["attention_chunk_size"])
    fields.only("rope.scaling.type", "none")
    interval = fields.integer("attention.sliding_window_pattern", 4)
    experts = metadata.experts("num_local_experts", intermediate="intermediate_size")
    return {
        "model_type": "llama4_text",
        **metadata.attention(windows=True),
        "sliding_window": None,
        **experts,
        "use_qk_norm": experts["num_local_experts"] != 128,  # Maverick, as in llama.cpp
        "no_rope_layers": [int((n + 1) % interval != 0) for n in layers],
        "moe_layers": [n for n in layers if metadata.has_gate(n)],
        "intermediate_size_mlp": fields.integer("feed_forward_length"),
    }
