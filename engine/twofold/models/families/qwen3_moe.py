"""Qwen3-MoE: grouped-query attention with per-head q/k norms, softmax-then-top-k routing, optional dense layers.

Reference: transformers `models/qwen3_moe`. Defaults below are those of `Qwen3MoeConfig`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_DEFAULTS: Final = {
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "rope_theta": 10_000.0, "sliding_window": 4096,
    "intermediate_size": 6144, "num_experts_per_tok": 8,
}  # fmt: skip


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(_DEFAULTS)
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
