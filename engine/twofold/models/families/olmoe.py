"""OLMoE: norms of queries and keys over all heads together, every layer a mixture, softmax-then-top-k routing.

Reference: transformers `models/olmoe`. Defaults below are those of `OlmoeConfig`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_DEFAULTS: Final = {
    "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10_000.0, "num_experts": 64,
    "num_experts_per_tok": 8, "intermediate_size": 2048,
}  # fmt: skip


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = config_json.with_all_heads(fields.defaulting(_DEFAULTS))
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
