"""Qwen3-MoE: grouped-query attention with per-head q/k norms, softmax-then-top-k routing, optional dense layers.

Reference: transformers `models/qwen3_moe`. Defaults below are those of `Qwen3MoeConfig`.
"""

from __future__ import annotations

from typing import Any

from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
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


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """Qwen3-MoE's config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    read_activation(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    hidden = fields.integer("hidden_size")
    eps = fields.number("rms_norm_eps", 1e-6, above=True)
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings", 32_768)
    sparse_step = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.integers("mlp_only_layers")
    moe_layers = {
        layer for layer in range(num_layers) if layer not in dense_layers and (layer + 1) % sparse_step == 0
    }
    uses_window = fields.boolean("use_sliding_window", False)
    attention = Gqa(
        layer=0,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim", max(1, hidden // num_heads)),
        eps=eps,
        bias=fields.boolean("attention_bias", False),
        o_bias=fields.boolean("attention_bias", False),
        qk_norm=True,
        sliding_window=fields.integer("sliding_window", 4096) if uses_window else None,
    )
    inner = fields.integer("intermediate_size", 6144) if len(moe_layers) < num_layers else 0
    expert_inner = fields.integer("moe_intermediate_size")
    num_experts = fields.integer(("num_experts", "num_local_experts"), maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", 8)
    mixture = (
        Router(0, hidden, num_experts, top_k, eps, fields.boolean("norm_topk_prob", False)),
        RoutedExperts(0, hidden, num_experts, top_k, expert_inner),
    )
    dense = (DenseFfn(0, hidden, inner, eps),)
    return read_outline(
        fields,
        generation,
        repeat_layers(num_layers, lambda layer: (attention, *(mixture if layer in moe_layers else dense))),
        eps=eps,
        rope=read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions),
        rope_dim=attention.head_dim,
        max_position_embeddings=max_positions,
    )


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "qwen3moe". Raises ModelLoadError naming the file and the key."""
    attention = metadata.attention(qk_norm=True)
    router, experts = metadata.mixture(("expert_feed_forward_length",))
    return metadata.outline(
        "Qwen3MoeForCausalLM",
        metadata.layers(attention, router, experts),
        rope=metadata.rope(10_000.0, attention.head_dim),
        rope_dim=attention.head_dim,
    )


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format."""
    attention, experts = config.blocks_of(Gqa)[0], config.routed
    dense = config.blocks_of(DenseFfn)
    return {
        "model_type": "qwen3_moe",
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "sliding_window": attention.sliding_window,
        "use_sliding_window": attention.sliding_window is not None,
        "intermediate_size": dense[0].intermediate_size if dense else experts.intermediate_size,
        "mlp_only_layers": [block.layer for block in dense],
        "moe_intermediate_size": experts.intermediate_size,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": config.blocks_of(Router)[0].renormalise,
    }
