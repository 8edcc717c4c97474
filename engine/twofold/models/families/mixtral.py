"""Mixtral: grouped-query attention, every layer a mixture, the k routing weights always divided by their sum.

Reference: transformers `models/mixtral`. Checkpoints call the experts'
matrices w1 (gate), w3 (up) and w2 (down) under `block_sparse_moe`; transformers 5 may write them fused under `mlp`.
GGUF files of architecture "llama" with experts are Mixtral and similar models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.models import config_json
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.families.decoders import DECODERS
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

MODULES: Final = ("mlp", "block_sparse_moe")
PROJECTIONS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    fields = fields.defaulting(defaults_of("mixtral"))
    config_json.read_activation(fields)
    attention = replace(
        config_json.read_attention(fields),
        sliding_window=fields.optional_integer("sliding_window", minimum=1),
        gguf_pairs_neighbours=True,
    )
    router, experts = config_json.read_mixture(fields, attention, intermediate="intermediate_size")
    router = replace(router, modules=MODULES)
    experts = replace(experts, modules=MODULES, projections=PROJECTIONS)
    return config_json.read_model(fields, generation, attention, lambda n: (attention, router, experts))


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "llama" in config.json's format. Raises ModelLoadError naming file and key.

    Without experts it is a Llama, whatever the published model is called.
    """
    if not metadata.fields.optional_integer("expert_count"):
        return {"architectures": ["LlamaForCausalLM"], **DECODERS["llama"].gguf_settings(metadata)}
    return {
        "model_type": "mixtral",
        "rope_parameters": metadata.rope_parameters(10_000.0),
        **metadata.attention(windows=True),
        **metadata.experts("num_local_experts", "feed_forward_length", intermediate="intermediate_size"),
        **metadata.softmax_router(),
    }
