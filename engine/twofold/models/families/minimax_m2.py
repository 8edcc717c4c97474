"""MiniMax-M2: norms of queries and keys over all heads together, partial rotation, sigmoid scores with a bias.

Reference: transformers `models/minimax_m2`. Defaults below are those of `MiniMaxM2Config`. GGUF files call it
"minimax-m2". Checkpoints call the experts' matrices w1 (gate), w3 (up) and w2 (down) under `block_sparse_moe`.
"""

from __future__ import annotations

from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_MODULES: Final = ("mlp", "block_sparse_moe")
_PROJECTIONS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_SIGMOID: Final = 2


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    common.read_activation(fields)
    for key, value in (
        ("scoring_func", "sigmoid"),
        ("use_qk_norm", True),
        ("use_routing_bias", True),
        ("shared_intermediate_size", 0),
    ):
        fields.only(key, value)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", 128)
    rotated = fields.integer("rotary_dim", head_dim, maximum=head_dim)
    max_positions = fields.integer("max_position_embeddings", 196_608)
    eps = fields.number("rms_norm_eps", 1e-6, above=True)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads", 8), head_dim, eps, qk_norm=True, flat_norms=True,
    )  # fmt: skip
    experts = fields.integer(("num_local_experts", "num_experts"), 256, maximum=common.MAX_EXPERTS)
    top_k, inner = fields.integer("num_experts_per_tok", 8), fields.integer("intermediate_size", 1536)
    blocks = _layer(attention, experts, top_k, inner)
    num_layers = fields.integer("num_hidden_layers", 62, maximum=common.MAX_LAYERS)
    config = common.read_outline(
        fields, generation, common.repeat_layers(num_layers, lambda n: blocks), eps=eps,
        rope=common.read_rope(fields, default_theta=5e6, max_position_embeddings=max_positions, partial=True),
        rope_dim=common.read_rotary_dim(fields, head_dim, rotated / head_dim), max_position_embeddings=max_positions,
    )  # fmt: skip
    return config.without_predictions(fields.where, fields.optional_integer("num_mtp_modules") or 0)


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "minimax-m2". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    fields.only("expert_gating_func", _SIGMOID, 0)
    attention = metadata.attention(flat_norms=True, partly_rotated=True)
    rope_dim = fields.integer("rope.dimension_count", attention.head_dim, maximum=attention.head_dim)
    experts = fields.integer("expert_count", maximum=common.MAX_EXPERTS)
    inner = fields.integer("expert_feed_forward_length")
    layer = _layer(attention, experts, fields.integer("expert_used_count"), inner)
    return metadata.outline(
        "MiniMaxM2ForCausalLM",
        common.repeat_layers(metadata.num_layers, lambda n: layer),
        rope=metadata.rope(5e6, rope_dim),
        rope_dim=rope_dim,
    )


def _layer(attention: Gqa, experts: int, top_k: int, inner: int) -> tuple[Block, ...]:
    hidden = attention.hidden_size
    router = Router(
        0, hidden, experts, top_k, attention.eps, renormalise=True, score="sigmoid", bias=True,
        bias_name="e_score_correction_bias", modules=_MODULES,
    )  # fmt: skip
    return attention, router, RoutedExperts(0, hidden, experts, top_k, inner, _MODULES, _PROJECTIONS)


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    attention, routed = config.blocks_of(Gqa)[0], config.routed
    if attention.sliding_window is not None or attention.bias:
        raise ModelLoadError(
            f"{where}: {config.architecture} has neither a sliding window nor biases; give the Hugging Face "
            "checkpoint instead"
        )
    return {
        "model_type": "minimax_m2", "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim, "rotary_dim": config.rope_dim,
        "intermediate_size": routed.intermediate_size, "num_local_experts": routed.num_experts,
        "num_experts_per_tok": routed.top_k, "scoring_func": "sigmoid",
    }  # fmt: skip
