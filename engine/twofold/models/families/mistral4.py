"""Mistral 4: DeepSeek's latent attention, queries scaled by position, softmax router by groups' two best experts.

Reference: transformers `models/mistral4`, defaults those of `Mistral4Config`. GGUF files call it "mistral4".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.blocks.temperature import Temperature
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families import deepseek
from twofold.models.gguf_config import GgufMetadata
from twofold.models.nested_config import text_fields, without_images
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    if config_json.architecture_name(fields) == "Mistral3ForConditionalGeneration":
        text = text_fields(fields, "Mistral4ForCausalLM")
        text.only("model_type", "mistral4")
        config = parse_config(text, generation)
        prefixes = (
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.", ""),
        )
        parts = ("vision_tower", "multi_modal_projector")
        return without_images(config, prefixes, *(f"{at}{part}.*" for at in ("", "model.") for part in parts))
    fields = fields.defaulting(defaults_of("mistral4"))
    config_json.read_activation(fields)
    rope = config_json.read_rope(fields, partial=True)
    attention = deepseek.read_attention(fields, rope, neighbours=fields.boolean("rope_interleave", True))
    attention = replace(attention, temperature=_read_temperature(fields))
    return config_json.compose_model(
        fields,
        generation,
        deepseek.read_layers(fields, attention, "ffn_norm", has_bias=False, group_score="top_two_sum"),
        eps=attention.eps,
        rope=rope,
        rope_dim=attention.qk_rope_head_dim,
    )


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "mistral4" in config.json's format. Raises ModelLoadError naming file and key."""
    fields, settings = metadata.fields, deepseek.gguf_settings(metadata)
    rope = settings["rope_parameters"]
    if slope := fields.number("attention.temperature_scale", 0.0):
        usual = rope.get("original_max_position_embeddings", fields.integer("context_length"))
        length = fields.integer("attention.temperature_length", usual)
        rope |= {"llama_4_scaling_beta": slope, "original_max_position_embeddings": length}
    known = {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
    return settings | known


def _read_temperature(fields: Fields) -> Temperature | None:
    section = fields.section(("rope_parameters", "rope_scaling"))
    slope = None if section is None else section.optional_number("llama_4_scaling_beta")
    if section is None or not slope:
        return None
    return Temperature(section.integer("original_max_position_embeddings"), slope, shift=0)
