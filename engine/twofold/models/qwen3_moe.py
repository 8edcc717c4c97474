"""Qwen3-MoE: grouped-query attention with per-head q/k norms, softmax-then-top-k routing, optional dense layers.

Reference: transformers `models/qwen3_moe`. Defaults below are those of `Qwen3MoeConfig`.
"""

from __future__ import annotations

from typing import Final

from twofold.blocks.weight_plan import WeightNaming
from twofold.models.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    GenerationDefaults,
    ModelConfig,
    architecture_name,
    read_activation,
    read_dtype,
    read_rope,
)
from twofold.weights.json_file import Fields

NAMING: Final = WeightNaming(moe_blocks=("mlp",), expert_projections=(("gate_proj", "up_proj", "down_proj"),))


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """Qwen3-MoE's config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    read_activation(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings", 32_768)
    sparse_step = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.integers("mlp_only_layers")
    moe_layers = tuple(
        layer for layer in range(num_layers) if layer not in dense_layers and (layer + 1) % sparse_step == 0
    )
    uses_window = fields.boolean("use_sliding_window", False)
    return ModelConfig(
        architecture=architecture_name(fields),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim", max(1, hidden_size // num_heads)),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=True),
        intermediate_size=fields.integer("intermediate_size", 6144) if len(moe_layers) < num_layers else 0,
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_experts=fields.integer(("num_experts", "num_local_experts"), maximum=MAX_EXPERTS),
        top_k=fields.integer("num_experts_per_tok", 8),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        moe_layers=moe_layers,
        rope=read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions),
        attention_bias=fields.boolean("attention_bias", False),
        qk_norm=True,
        sliding_window=fields.integer("sliding_window", 4096) if uses_window else None,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        eos_token_ids=generation.eos_token_ids or fields.integers("eos_token_id"),
        generation=generation,
    )
