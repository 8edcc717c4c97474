"""Mixtral: grouped-query attention, every layer a mixture, the k routing weights always divided by their sum.

Reference: transformers `models/mixtral`. Defaults below are those of `MixtralConfig`. Checkpoints call the experts'
matrices w1 (gate), w3 (up) and w2 (down) under `block_sparse_moe`; transformers 5 may write them fused under `mlp`.
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

NAMING: Final = WeightNaming(
    moe_blocks=("block_sparse_moe", "mlp"),
    expert_projections=(("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")),
)


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """Mixtral's config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    read_activation(fields)
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings", 131_072)
    return ModelConfig(
        architecture=architecture_name(fields),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim", max(1, hidden_size // num_heads)),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5, above=True),
        intermediate_size=0,
        moe_intermediate_size=fields.integer("intermediate_size"),
        num_experts=fields.integer(("num_local_experts", "num_experts"), 8, maximum=MAX_EXPERTS),
        top_k=fields.integer("num_experts_per_tok", 2),
        norm_topk_prob=True,
        moe_layers=tuple(range(num_layers)),
        rope=read_rope(fields, default_theta=1_000_000.0, max_position_embeddings=max_positions),
        sliding_window=fields.optional_integer("sliding_window", minimum=1),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=fields.optional_integer("pad_token_id"),
        eos_token_ids=generation.eos_token_ids or fields.integers("eos_token_id"),
        generation=generation,
    )
