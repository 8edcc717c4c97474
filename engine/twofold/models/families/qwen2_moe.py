"""Qwen2-MoE and Qwen1.5-MoE: biases of q, k and v, softmax-then-top-k routing, gated shared experts.

Reference: transformers `models/qwen2_moe`. Defaults below are those of `Qwen2MoeConfig`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_SLIDING, _FULL = "sliding_attention", "full_attention"


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    common.read_activation(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    eps = fields.number("rms_norm_eps", 1e-6, above=True)
    max_positions = fields.integer("max_position_embeddings", 32_768)
    plain = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", num_heads),
        fields.integer("head_dim", max(1, hidden // num_heads)), eps, bias=fields.boolean("qkv_bias", True),
    )  # fmt: skip
    windowed = replace(plain, sliding_window=fields.integer("sliding_window", 4096, minimum=0) or None)
    slides = _sliding_layers(fields, num_layers)
    step, dense_layers = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    is_moe = [n not in dense_layers and (n + 1) % step == 0 for n in range(num_layers)]
    experts = fields.integer(("num_experts", "num_local_experts"), 60, maximum=common.MAX_EXPERTS)
    top_k, shared = (
        fields.integer("num_experts_per_tok", 4),
        fields.integer("shared_expert_intermediate_size", 5632),
    )
    mixture = (
        Router(0, hidden, experts, top_k, eps, fields.boolean("norm_topk_prob", False)),
        SharedExperts(0, hidden, shared, "mlp.shared_expert", gated=True),
        RoutedExperts(0, hidden, experts, top_k, fields.integer("moe_intermediate_size", 1408)),
    )
    dense = (DenseFfn(0, hidden, 1 if all(is_moe) else fields.integer("intermediate_size", 5632), eps),)
    layers = common.repeat_layers(
        num_layers, lambda n: (windowed if n in slides else plain, *(mixture if is_moe[n] else dense))
    )
    return common.read_outline(
        fields, generation, layers, eps=eps, rope_dim=plain.head_dim, max_position_embeddings=max_positions,
        rope=common.read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions),
    )  # fmt: skip


def _sliding_layers(fields: Fields, num_layers: int) -> set[int]:
    """Layers with a sliding window; without a list, every other one of the first layers."""
    if not fields.boolean("use_sliding_window", False):
        return set()
    first = fields.integer("max_window_layers", 28, minimum=0)
    return common.read_layer_types(
        fields, num_layers, _SLIDING, lambda layer: layer < first and layer % 2 == 0
    )


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "qwen2moe". Raises ModelLoadError naming the file and the key."""
    attention = metadata.attention(o_bias=False)
    router, experts = metadata.mixture(("expert_feed_forward_length",), renormalise=False)
    width = metadata.fields.integer(("expert_shared_feed_forward_length", "feed_forward_length"))
    shared = SharedExperts(0, metadata.hidden_size, width, "mlp.shared_expert", gated=True)
    return metadata.outline(
        "Qwen2MoeForCausalLM",
        metadata.layers(attention, router, shared, experts),
        rope=metadata.rope(10_000.0, attention.head_dim),
        rope_dim=attention.head_dim,
    )


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format."""
    attention, experts, dense = config.blocks_of(Gqa), config.routed, config.blocks_of(DenseFfn)
    windows = [block.sliding_window for block in attention]
    return {
        "model_type": "qwen2_moe",
        "num_attention_heads": attention[0].num_heads,
        "num_key_value_heads": attention[0].num_kv_heads,
        "head_dim": attention[0].head_dim,
        "qkv_bias": attention[0].bias,
        "use_sliding_window": any(windows),
        "sliding_window": next(filter(None, windows), None),
        "layer_types": [_SLIDING if window else _FULL for window in windows],
        "intermediate_size": dense[0].intermediate_size if dense else experts.intermediate_size,
        "mlp_only_layers": [block.layer for block in dense],
        "shared_expert_intermediate_size": config.blocks_of(SharedExperts)[0].intermediate_size,
        "moe_intermediate_size": experts.intermediate_size,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": config.blocks_of(Router)[0].renormalise,
    }
