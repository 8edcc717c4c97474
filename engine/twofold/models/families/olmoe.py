"""OLMoE: norms of queries and keys over all heads together, every layer a mixture, softmax-then-top-k routing.

Reference: transformers `models/olmoe`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("olmoe"))
    config_json.read_activation(fields)
    fields.only("clip_qkv", None)
    attention = replace(config_json.read_attention(fields), qk_norm=True, flat_norms=True)
    mixture = config_json.read_mixture(fields, attention, intermediate="intermediate_size")
    return config_json.read_model(fields, generation, attention, lambda n: (attention, *mixture))


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "olmoe" in config.json's format. Raises ModelLoadError naming file and key."""
    metadata.fields.only("attention.clamp_kqv", 0.0)
    return {
        "model_type": "olmoe",
        **metadata.attention(),
        **metadata.experts("num_experts", "feed_forward_length", intermediate="intermediate_size"),
        **metadata.softmax_router(renormalise=False),
    }
