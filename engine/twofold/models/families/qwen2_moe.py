"""Qwen2-MoE and Qwen1.5-MoE: biases of q, k and v, softmax-then-top-k routing, gated shared experts.

Reference: transformers `models/qwen2_moe`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_SLIDING: Final = "sliding_attention"


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("qwen2_moe"))
    config_json.read_activation(fields)
    plain = replace(config_json.read_attention(fields), bias=fields.boolean("qkv_bias", True), o_bias=False)
    windowed = replace(plain, sliding_window=fields.integer("sliding_window", minimum=0) or None)
    slides = _sliding_layers(fields)
    router, experts = config_json.read_mixture(fields, plain)
    width = fields.integer("shared_expert_intermediate_size")
    shared = SharedExperts(0, plain.hidden_size, width, "mlp.shared_expert", gated=True)
    dense_layers, dense = config_json.read_dense_layers(fields, plain)

    def layer(n: int) -> tuple[Block, ...]:
        attention = windowed if n in slides else plain
        return (attention, dense) if n in dense_layers else (attention, router, shared, experts)

    return config_json.read_model(fields, generation, plain, layer)


def _sliding_layers(fields: Fields) -> set[int]:
    """Layers with a sliding window; without a list, every other one of the first layers."""
    if not fields.boolean("use_sliding_window", False):
        return set()
    first = fields.integer("max_window_layers", minimum=0)
    return config_json.read_layer_types(fields, _SLIDING, lambda n: n < first and n % 2 == 0)


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "qwen2moe" in config.json's format. Raises ModelLoadError naming file and key."""
    attention = metadata.attention(windows=True)
    kind = "full_attention" if attention["sliding_window"] is None else _SLIDING
    shared = ("expert_shared_feed_forward_length", "feed_forward_length")
    return {
        "model_type": "qwen2_moe",
        **attention,
        "qkv_bias": attention["attention_bias"],
        "use_sliding_window": kind == _SLIDING,
        "layer_types": [kind] * metadata.num_layers,
        **metadata.dense_layers(),
        **metadata.experts(),
        "shared_expert_intermediate_size": metadata.fields.integer(shared),
        **metadata.softmax_router(renormalise=False),
    }
