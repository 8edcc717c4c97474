"""Qwen3-MoE: grouped-query attention with per-head q/k norms, softmax-then-top-k routing, optional dense layers.

Reference: transformers `models/qwen3_moe`.
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
    fields = fields.defaulting(defaults_of("qwen3_moe"))
    config_json.read_activation(fields)
    attention = replace(config_json.read_attention(fields), qk_norm=True)
    if fields.boolean("use_sliding_window", False):
        attention = replace(attention, sliding_window=fields.integer("sliding_window"))
    mixture = config_json.read_mixture(fields, attention)
    dense_layers, dense = config_json.read_dense_layers(fields, attention)
    config = config_json.read_model(
        fields,
        generation,
        attention,
        lambda n: (attention, dense) if n in dense_layers else (attention, *mixture),
    )
    # Published models have no prediction layer; trained ones are named as DeepSeek-V3's.
    count = fields.optional_integer("num_nextn_predict_layers") or 0
    return config.predicting(fields.where, count, (attention, *mixture))


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "qwen3moe" in config.json's format. Raises ModelLoadError naming file and key."""
    attention = metadata.attention(windows=True)
    return {
        "model_type": "qwen3_moe",
        **attention,
        "use_sliding_window": attention["sliding_window"] is not None,
        **metadata.dense_layers(),
        **metadata.experts(),
        **metadata.softmax_router(),
    }
