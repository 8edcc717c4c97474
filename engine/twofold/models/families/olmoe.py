"""OLMoE: norms of queries and keys over all heads together, every layer a mixture, softmax-then-top-k routing.

Reference: transformers `models/olmoe`. Defaults below are those of `OlmoeConfig`.
"""

from __future__ import annotations

from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_EXPERT_SIZES: Final = ("expert_feed_forward_length", "feed_forward_length")


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    common.read_activation(fields)
    fields.only("clip_qkv", None)
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    eps = fields.number("rms_norm_eps", 1e-5, above=True)
    max_positions = fields.integer("max_position_embeddings", 4096)
    bias = fields.boolean("attention_bias", False)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", num_heads),
        fields.integer("head_dim", max(1, hidden // num_heads)), eps, bias=bias, o_bias=bias, qk_norm=True,
        flat_norms=True,
    )  # fmt: skip
    experts = fields.integer(("num_experts", "num_local_experts"), 64, maximum=common.MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", 8)
    blocks = (
        attention,
        Router(0, hidden, experts, top_k, eps, fields.boolean("norm_topk_prob", False)),
        RoutedExperts(0, hidden, experts, top_k, fields.integer("intermediate_size", 2048)),
    )
    return common.read_outline(
        fields, generation, common.repeat_layers(num_layers, lambda n: blocks), eps=eps, rope_dim=attention.head_dim,
        rope=common.read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions),
        max_position_embeddings=max_positions,
    )  # fmt: skip


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "olmoe". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    if fields.number("attention.clamp_kqv", 0.0) != 0.0:
        raise fields.error(
            "attention.clamp_kqv", fields.data["attention.clamp_kqv"], "0, the only supported value"
        )
    attention = metadata.attention(flat_norms=True)
    router, experts = metadata.mixture(_EXPERT_SIZES, renormalise=False)
    return metadata.outline(
        "OlmoeForCausalLM",
        metadata.layers(attention, router, experts),
        rope=metadata.rope(10_000.0, attention.head_dim),
        rope_dim=attention.head_dim,
    )


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    attention, experts = config.blocks_of(Gqa)[0], config.routed
    if attention.sliding_window is not None or len(config.moe_layers) < config.num_layers:
        raise ModelLoadError(
            f"{where}: {config.architecture} has neither a sliding window nor dense layers; give the Hugging Face "
            "checkpoint instead"
        )
    return {
        "model_type": "olmoe",
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "intermediate_size": experts.intermediate_size,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": config.blocks_of(Router)[0].renormalise,
    }
