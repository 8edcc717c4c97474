"""Granite with experts (1B-A400M, 3B-A800M), with and without shared ones: multipliers, softmax over the chosen.

Reference: transformers `models/granitemoe` and `models/granitemoeshared`. Defaults below are those of their
configurations. GGUF files call both "granitemoe".

The layers' outputs are multiplied by the residual multiplier m. Every layer reads the residual stream through a norm,
so dividing the embeddings by m and the norms' epsilon by m² is equivalent.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_MODULE: Final = "block_sparse_moe"
_FUSED: Final = (
    ("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight"),
)  # fmt: skip
_INNER: Final = ("expert_feed_forward_length", "feed_forward_length")


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    common.read_activation(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    residual = fields.number("residual_multiplier", 1.0, minimum=1e-6)
    eps = fields.number("rms_norm_eps", 1e-6, above=True) / residual**2
    max_positions = fields.integer("max_position_embeddings", 2048)
    bias = fields.boolean("attention_bias", False)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", num_heads),
        fields.integer("head_dim", max(1, hidden // num_heads)), eps, bias=bias, o_bias=bias,
        multiplier=fields.number("attention_multiplier", 1.0, above=True), gguf_pairs_neighbours=True,
    )  # fmt: skip
    layer = _layer(
        attention, fields.integer(("num_local_experts", "num_experts"), 8, maximum=common.MAX_EXPERTS),
        fields.integer("num_experts_per_tok", 2), fields.integer("intermediate_size"),
        fields.integer("shared_intermediate_size", 0, minimum=0),
    )  # fmt: skip
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    config = common.read_outline(
        fields, generation, common.repeat_layers(num_layers, lambda n: layer), eps=eps,
        rope=common.read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions),
        rope_dim=attention.head_dim, max_position_embeddings=max_positions,
    )  # fmt: skip
    return _scaled(config, fields, "embedding_multiplier", residual, "logits_scaling")


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "granitemoe". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    fields.only("rope.scaling.finetuned", True)
    residual = fields.number("residual_scale", 1.0, minimum=1e-6)
    metadata = copy.copy(metadata)
    metadata.eps /= residual**2
    multiplier = fields.number("attention.scale", 0.0) or None
    attention = replace(metadata.attention(pairs_neighbours=True), multiplier=multiplier)
    shared = fields.integer("expert_shared_feed_forward_length", 0, minimum=0)
    layer = _layer(
        attention, fields.integer("expert_count", maximum=common.MAX_EXPERTS), fields.integer("expert_used_count"),
        fields.integer(_INNER), shared,
    )  # fmt: skip
    config = metadata.outline(
        f"GraniteMoe{'Shared' if shared else ''}ForCausalLM",
        common.repeat_layers(metadata.num_layers, lambda n: layer),
        rope=metadata.rope(10_000.0, attention.head_dim), rope_dim=attention.head_dim,
    )  # fmt: skip
    return _scaled(config, fields, "embedding_scale", residual, "logit_scale")


def _layer(attention: Gqa, experts: int, top_k: int, inner: int, shared: int) -> tuple[Block, ...]:
    hidden = attention.hidden_size
    router = Router(
        0, hidden, experts, top_k, attention.eps, renormalise=False, score="softmax_of_chosen", modules=(_MODULE,),
        gates=("router", "router.layer"),
    )  # fmt: skip
    beside = (SharedExperts(0, hidden, shared, "shared_mlp", fused=("input_linear", "output_linear")),)
    routed = RoutedExperts(0, hidden, experts, top_k, inner, (_MODULE,), fused=_FUSED)
    return attention, router, *(beside if shared else ()), routed


def _scaled(config: ModelConfig, fields: Fields, embedding: str, residual: float, logits: str) -> ModelConfig:
    """The configuration with the multipliers at these keys."""
    of_rows = fields.number(embedding, 1.0, above=True) / residual
    of_logits = 1.0 / fields.number(logits, 1.0, above=True)
    return replace(
        config, embedding=replace(config.embedding, scale=of_rows), head=replace(config.head, scale=of_logits)
    )


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format, with a residual multiplier of 1. Raises ModelLoadError like other
    families."""
    attention, routed = config.blocks_of(Gqa)[0], config.routed
    shared = config.blocks_of(SharedExperts)
    if attention.sliding_window is not None:
        raise ModelLoadError(
            f"{where}: {config.architecture} has no sliding window; give the Hugging Face checkpoint instead"
        )
    return {
        "model_type": "granitemoeshared" if shared else "granitemoe", "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim,
        "attention_bias": attention.bias, "intermediate_size": routed.intermediate_size,
        "shared_intermediate_size": shared[0].intermediate_size if shared else 0,
        "num_local_experts": routed.num_experts, "num_experts_per_tok": routed.top_k,
        "attention_multiplier": attention.scale, "embedding_multiplier": config.embedding.scale,
        "residual_multiplier": 1.0, "logits_scaling": 1.0 / config.head.scale,
    }  # fmt: skip
