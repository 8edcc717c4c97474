"""GLM-4.5, 4.6, 4.7 and Air: grouped-query attention of which a share of each head is rotated, DeepSeek-V3's router.

Reference: transformers `models/glm4_moe`. Defaults below are those of `Glm4MoeConfig`. GGUF files call it "glm4moe". If
a value has several keys, the first is config.json's, the others are GGUF's.
"""

from __future__ import annotations

from typing import Any, Final

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_GGUF_NORM: Final = "post_attention_norm"
_SIGMOID: Final = 2


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    common.read_activation(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    max_positions = fields.integer("max_position_embeddings", 131_072)
    eps = fields.number("rms_norm_eps", 1e-5, above=True)
    attention = Gqa(
        0, hidden, num_heads, fields.integer("num_key_value_heads"),
        fields.integer("head_dim", max(1, hidden // num_heads)), eps,
        bias=fields.boolean("attention_bias", False), qk_norm=fields.boolean("use_qk_norm", False),
    )  # fmt: skip
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    config = common.read_outline(
        fields, generation, _layers(fields, num_layers, attention), eps=eps,
        rope=common.read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions, partial=True),
        rope_dim=common.read_rotary_dim(fields, attention.head_dim, 0.5), max_position_embeddings=max_positions,
    )  # fmt: skip
    further = fields.optional_integer(("num_nextn_predict_layers", "num_mtp_layers")) or 0
    return config.without_predictions(fields.where, further)


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "glm4moe". Raises ModelLoadError naming the file and the key."""
    fields = metadata.fields
    if fields.integer("expert_gating_func", _SIGMOID, minimum=0) not in (0, _SIGMOID):
        raise fields.error("expert_gating_func", fields.data["expert_gating_func"], f"{_SIGMOID} (sigmoid)")
    qk_norm = "blk.0.attn_q_norm.weight" in metadata.file.tensors
    attention = metadata.attention(qk_norm=qk_norm, o_bias=False, partly_rotated=True)
    rope_dim = fields.integer("rope.dimension_count", attention.head_dim, maximum=attention.head_dim)
    further = fields.integer("nextn_predict_layers", 0, minimum=0)
    layers = _layers(fields, metadata.num_layers - further, attention)
    rope = metadata.rope(10_000.0, rope_dim)
    config = metadata.outline("Glm4MoeForCausalLM", layers, rope=rope, rope_dim=rope_dim)
    return config.without_predictions(fields.where, further)


def _layers(fields: Fields, num_layers: int, attention: Gqa) -> tuple[tuple[Block, ...], ...]:
    hidden, eps = attention.hidden_size, attention.eps
    experts = fields.integer(("n_routed_experts", "expert_count"), maximum=common.MAX_EXPERTS)
    top_k = fields.integer(("num_experts_per_tok", "expert_used_count"))
    router = Router(
        0, hidden, experts, top_k, eps, fields.boolean(("norm_topk_prob", "expert_weights_norm"), True),
        scale=fields.number(("routed_scaling_factor", "expert_weights_scale"), 1.0) or 1.0,
        score="sigmoid", bias=True, group_score="top_two_sum", gguf_norm=_GGUF_NORM,
        num_groups=fields.integer(("n_group", "expert_group_count"), 1),
        top_groups=fields.integer(("topk_group", "expert_group_used_count"), 1),
    )  # fmt: skip
    inner = fields.integer(("moe_intermediate_size", "expert_feed_forward_length"))
    shared = fields.integer(("n_shared_experts", "expert_shared_count"), 1, minimum=0)
    beside = (SharedExperts(0, hidden, shared * inner),) if shared else ()
    mixture = (router, *beside, RoutedExperts(0, hidden, experts, top_k, inner))
    first = fields.integer(("first_k_dense_replace", "leading_dense_block_count"), 1, minimum=0)
    wide = fields.integer(("intermediate_size", "feed_forward_length"))
    dense = (DenseFfn(0, hidden, wide, eps, _GGUF_NORM),)
    return common.repeat_layers(num_layers, lambda n: (attention, *(mixture if n >= first else dense)))


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format. Raises ModelLoadError for layers it cannot express."""
    attention, router, routed = config.blocks_of(Gqa)[0], config.blocks_of(Router)[0], config.routed
    dense, shared = config.blocks_of(DenseFfn), config.blocks_of(SharedExperts)
    if attention.sliding_window is not None:
        raise ModelLoadError(
            f"{where}: {config.architecture} has no sliding window; give the Hugging Face checkpoint instead"
        )
    inner = routed.intermediate_size
    return {
        "model_type": "glm4_moe", "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim,
        "partial_rotary_factor": common.rotary_share(config.rope_dim, attention.head_dim),
        "attention_bias": attention.bias, "use_qk_norm": attention.qk_norm,
        "first_k_dense_replace": config.moe_layers[0], "moe_intermediate_size": inner,
        "intermediate_size": dense[0].intermediate_size if dense else inner,
        "n_shared_experts": shared[0].intermediate_size // inner if shared else 0,
        "n_routed_experts": routed.num_experts, "num_experts_per_tok": routed.top_k,
        "norm_topk_prob": router.renormalise, "routed_scaling_factor": router.scale,
        "n_group": router.num_groups, "topk_group": router.top_groups,
    }  # fmt: skip
