"""gpt-oss: attention with sinks and biases, a window in every other layer; experts with biases and a clamped SwiGLU.

Reference: transformers `models/gpt_oss`. GGUF files call it "gpt-oss".
YaRN's range of dimensions is not rounded to whole ones (`truncate`); GGUF files have no key for that. llama.cpp rounds
it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.blocks.biased_experts import BiasedExperts
from twofold.blocks.rope import RopeConfig
from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_SLIDING, _FULL = "sliding_attention", "full_attention"


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("gpt_oss"))
    config_json.read_activation(fields)
    fields.only("swiglu_alpha", 1.702, None)
    full = replace(config_json.read_attention(fields), sinks=True)
    windowed = replace(full, sliding_window=fields.integer("sliding_window", minimum=0) or None)
    windows = config_json.read_layer_types(fields, _SLIDING, lambda n: n % 2 == 0)
    router, experts = config_json.read_mixture(fields, full, intermediate="intermediate_size")
    router = replace(
        router,
        renormalise=False,
        score="softmax_of_chosen",
        gates=("router",),
        gate_bias=True,
        gguf_norm="post_attention_norm",
    )
    limit = fields.number("swiglu_limit", 7.0, above=True)
    biased = BiasedExperts(**vars(experts) | {"activation": "swiglu_oai", "limit": limit})
    rope = config_json.read_rope(fields)
    if fields.section(("rope_parameters", "rope_scaling")) is None:
        rope = RopeConfig("yarn", rope.theta, 32.0, original_max_position_embeddings=4096, truncate=False)
    return config_json.read_model(
        fields,
        generation,
        full,
        lambda n: (windowed if n in windows else full, router, biased),
        rope=rope,
    )


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "gpt-oss" in config.json's format. Raises ModelLoadError naming file and key."""
    metadata.expect_score("softmax_of_chosen")
    attention = metadata.attention(windows=True)
    return {
        "model_type": "gpt_oss",
        "rope_parameters": metadata.rope_parameters() | {"truncate": False},
        **attention,
        "sliding_window": attention["sliding_window"] or 0,
        "layer_types": [_FULL if n % 2 else _SLIDING for n in range(metadata.num_layers)],
        **metadata.experts("num_local_experts", intermediate="intermediate_size"),
    }
