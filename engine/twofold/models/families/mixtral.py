"""Mixtral: grouped-query attention, every layer a mixture, the k routing weights always divided by their sum.

Reference: transformers `models/mixtral`. Defaults below are those of `MixtralConfig`. Checkpoints call the experts'
matrices w1 (gate), w3 (up) and w2 (down) under `block_sparse_moe`; transformers 5 may write them fused under `mlp`.
GGUF files of architecture "llama" with experts are Mixtral and similar models.
"""

from __future__ import annotations

from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.models.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    GenerationDefaults,
    ModelConfig,
    read_activation,
    read_outline,
    read_rope,
    repeat_layers,
)
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_MODULES: Final = ("mlp", "block_sparse_moe")
_PROJECTIONS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """Mixtral's config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    read_activation(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    hidden = fields.integer("hidden_size")
    eps = fields.number("rms_norm_eps", 1e-5, above=True)
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings", 131_072)
    attention = Gqa(
        layer=0,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim", max(1, hidden // num_heads)),
        eps=eps,
        sliding_window=fields.optional_integer("sliding_window", minimum=1),
        gguf_pairs_neighbours=True,
    )
    inner = fields.integer("intermediate_size")
    num_experts = fields.integer(("num_local_experts", "num_experts"), 8, maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", 2)
    blocks = (
        attention,
        Router(0, hidden, num_experts, top_k, eps, renormalise=True, modules=_MODULES),
        RoutedExperts(0, hidden, num_experts, top_k, inner, _MODULES, _PROJECTIONS),
    )
    return read_outline(
        fields,
        generation,
        repeat_layers(num_layers, lambda layer: blocks),
        eps=eps,
        rope=read_rope(fields, default_theta=1_000_000.0, max_position_embeddings=max_positions),
        rope_dim=attention.head_dim,
        max_position_embeddings=max_positions,
    )


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "llama". Raises ModelLoadError naming the file and the key."""
    attention = metadata.attention(pairs_neighbours=True)
    sizes = ("expert_feed_forward_length", "feed_forward_length")
    router, experts = metadata.mixture(sizes, _MODULES, _PROJECTIONS)
    return metadata.outline(
        "MixtralForCausalLM",
        metadata.layers(attention, router, experts),
        rope=metadata.rope(10_000.0, attention.head_dim),
        rope_dim=attention.head_dim,
    )


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    attention, experts = config.blocks_of(Gqa)[0], config.routed
    if not config.blocks_of(Router)[0].renormalise or attention.bias:
        raise ModelLoadError(
            f"{where}: {config.architecture} cannot have biases or unnormalised routing weights; quantise the "
            "Hugging Face checkpoint instead"
        )
    return {
        "model_type": "mixtral",
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "sliding_window": attention.sliding_window,
        "intermediate_size": experts.intermediate_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }
