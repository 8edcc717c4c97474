"""DeepSeek-V2 and V3: latent attention, shared experts beside the routed ones, dense layers at the beginning.

V2 routes by softmax, within the groups with the best expert. V3 routes by sigmoid and a bias, within the groups with
the largest sum of their two best. Kimi-K2 (which calls itself V3), `glm4_moe_lite` and `kimi_k25` route like V3.
References: transformers `models/deepseek_v2` and `deepseek_v3`; for `moe_layer_freq` the published code. GGUF files
call both "deepseek2". If a value has several keys, the first is config.json's, the others are GGUF's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.mla import Mla
from twofold.blocks.rope import RopeConfig
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config as common
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_V2: Final = "DeepseekV2ForCausalLM"
_V3: Final = "DeepseekV3ForCausalLM"


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    common.read_activation(fields)
    is_v3 = common.architecture_name(fields) != _V2
    fields.only("topk_method", *(("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")))
    fields.only("scoring_func", "sigmoid" if is_v3 else "softmax")
    # transformers and the published code disagree about the effect of normalising on V2's weights.
    fields.only("norm_topk_prob", *((True, False) if is_v3 else (False, None)))
    fields.only("mlp_bias", False, None)
    num_layers = fields.integer("num_hidden_layers", maximum=common.MAX_LAYERS)
    eps = fields.number("rms_norm_eps", 1e-6, above=True)
    max_positions = fields.integer("max_position_embeddings", 4096 if is_v3 else 2048)
    rope = common.read_rope(fields, default_theta=10_000.0, max_position_embeddings=max_positions)
    layers = _layers(fields, num_layers, fields.integer("hidden_size"), eps, rope, is_v3, is_v3)
    config = common.read_outline(
        fields, generation, layers, eps=eps, rope=rope, rope_dim=fields.integer("qk_rope_head_dim"),
        max_position_embeddings=max_positions,
    )  # fmt: skip
    return config.without_predictions(fields.where, fields.optional_integer("num_nextn_predict_layers") or 0)


def parse_gguf(metadata: GgufMetadata) -> ModelConfig:
    """A GGUF file of architecture "deepseek2". Raises ModelLoadError naming the file and the key."""
    fields, rope_dim = metadata.fields, metadata.fields.integer("rope.dimension_count")
    is_v3 = fields.integer("expert_gating_func", 0, minimum=0) == 2  # sigmoid
    rope = metadata.rope(10_000.0, rope_dim)
    if weight := fields.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1:  # of mscale_all_dim
        rope = replace(rope, mscale=weight, mscale_all_dim=weight)
    further = fields.integer("nextn_predict_layers", 0, minimum=0)
    sizes = metadata.num_layers - further, metadata.hidden_size, metadata.eps
    layers = _layers(fields, *sizes, rope, is_v3, False)
    config = metadata.outline(_V3 if is_v3 else _V2, layers, rope=rope, rope_dim=rope_dim)
    return config.without_predictions(fields.where, further)


def _layers(
    fields: Fields, num_layers: int, hidden: int, eps: float, rope: RopeConfig, is_v3: bool, renormalise: bool
) -> tuple[tuple[Block, ...], ...]:
    rope_dim = fields.integer(("qk_rope_head_dim", "rope.dimension_count"))
    key_length = ("attention.key_length_mla", "attention.key_length")  # the latter in older files
    nope_dim = fields.optional_integer("qk_nope_head_dim") or fields.integer(key_length) - rope_dim
    mscale = 0.1 * (rope.mscale_all_dim or 0.0) * math.log(rope.factor) + 1.0 if rope.kind == "yarn" else 1.0
    attention = Mla(
        0, hidden, fields.integer(("num_attention_heads", "attention.head_count")),
        fields.optional_integer(("q_lora_rank", "attention.q_lora_rank")) or None,
        fields.integer(("kv_lora_rank", "attention.kv_lora_rank")), nope_dim, rope_dim,
        fields.integer(("v_head_dim", "attention.value_length_mla", "attention.value_length")), eps,
        scale=float((nope_dim + rope_dim) ** -0.5 * mscale**2), bias=fields.boolean("attention_bias", False),
        neighbours=not is_v3 or fields.boolean("rope_interleave", True),
    )  # fmt: skip
    experts = fields.integer(("n_routed_experts", "expert_count"), maximum=common.MAX_EXPERTS)
    top_k = fields.integer(("num_experts_per_tok", "expert_used_count"))
    plain = fields.data.get("topk_method") == "greedy"
    router = Router(
        0, hidden, experts, top_k, eps, fields.boolean(("norm_topk_prob", "expert_weights_norm"), renormalise) is True,
        scale=fields.number(("routed_scaling_factor", "expert_weights_scale"), 1.0) or 1.0,
        score="sigmoid" if is_v3 else "softmax", bias=is_v3, group_score="top_two_sum" if is_v3 else "max",
        num_groups=1 if plain else fields.integer(("n_group", "expert_group_count"), 1),
        top_groups=1 if plain else fields.integer(("topk_group", "expert_group_used_count"), 1),
    )  # fmt: skip
    inner = fields.integer(("moe_intermediate_size", "expert_feed_forward_length"))
    shared = fields.optional_integer(("n_shared_experts", "expert_shared_count")) or 0
    beside = (SharedExperts(0, hidden, shared * inner),) if shared else ()
    mixture = (router, *beside, RoutedExperts(0, hidden, experts, top_k, inner))
    dense = (DenseFfn(0, hidden, fields.integer(("intermediate_size", "feed_forward_length")), eps),)
    first = fields.integer(("first_k_dense_replace", "leading_dense_block_count"), 0, minimum=0)
    every = fields.integer("moe_layer_freq", 1)
    return common.repeat_layers(
        num_layers, lambda n: (attention, *(mixture if n >= first and n % every == 0 else dense))
    )


def config_fields(config: ModelConfig, where: str) -> dict[str, Any]:
    """The layers in config.json's format."""
    attention, router, routed = config.blocks_of(Mla)[0], config.blocks_of(Router)[0], config.routed
    dense, shared = config.blocks_of(DenseFfn), config.blocks_of(SharedExperts)
    is_v3, inner = config.architecture != _V2, routed.intermediate_size
    method = "greedy" if router.num_groups == 1 else "group_limited_greedy"
    same = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {key: getattr(attention, key) for key in same} | {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2", "topk_method": "noaux_tc" if is_v3 else method,
        "num_attention_heads": attention.num_heads, "num_key_value_heads": attention.num_heads,
        "attention_bias": attention.bias, "rope_interleave": attention.neighbours,
        "first_k_dense_replace": config.moe_layers[0], "moe_intermediate_size": inner,
        "intermediate_size": dense[0].intermediate_size if dense else inner,
        "n_shared_experts": shared[0].intermediate_size // inner if shared else None,
        "n_routed_experts": routed.num_experts, "num_experts_per_tok": routed.top_k,
        "scoring_func": router.score, "norm_topk_prob": router.renormalise,
        "routed_scaling_factor": router.scale, "n_group": router.num_groups, "topk_group": router.top_groups,
    }  # fmt: skip
