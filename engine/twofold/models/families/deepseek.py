"""DeepSeek-V2 and V3: latent attention, shared experts beside the routed ones, dense layers at the beginning.

V2 routes by softmax, within the groups with the best expert. V3 routes by sigmoid and a bias, within the groups with
the largest sum of their two best. Kimi-K2 (which calls itself V3), `glm4_moe_lite` and `kimi_k25` route like V3.
References: transformers `models/deepseek_v2` and `deepseek_v3`; for `moe_layer_freq` the published code. GGUF files
call both "deepseek2".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal

from twofold.blocks.block import Block
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.mla import Mla
from twofold.blocks.rope import RopeConfig
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.models import config_json
from twofold.models.config import MAX_EXPERTS, GenerationDefaults, ModelConfig
from twofold.models.defaults import defaults_of
from twofold.models.gguf_config import GgufMetadata
from twofold.weights.json_file import Fields

_V2: Final = "DeepseekV2ForCausalLM"
_V3: Final = "DeepseekV3ForCausalLM"
_SIGMOID: Final = 2


def parse_config(fields: Fields, generation: GenerationDefaults) -> ModelConfig:
    """config.json as a ModelConfig. Raises ModelLoadError naming the file and the key."""
    is_v3 = config_json.architecture_name(fields) != _V2
    fields = fields.defaulting(defaults_of("deepseek_v3" if is_v3 else "deepseek_v2"))
    config_json.read_activation(fields)
    fields.only("topk_method", *(("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")))
    fields.only("scoring_func", "sigmoid" if is_v3 else "softmax")
    # transformers and the published code disagree about the effect of normalising on V2's weights.
    if not is_v3 and not fields.boolean("values_of_gguf", False):
        fields.only("norm_topk_prob", False, None)
    fields.only("mlp_bias", False, None)
    rope = config_json.read_rope(fields)
    attention = read_attention(fields, rope, neighbours=not is_v3 or fields.boolean("rope_interleave", True))
    layer_of = read_layers(fields, attention, "ffn_norm", has_bias=is_v3)
    config = config_json.compose_model(
        fields,
        generation,
        layer_of,
        eps=attention.eps,
        rope=rope,
        rope_dim=attention.qk_rope_head_dim,
    )
    count = fields.optional_integer("num_nextn_predict_layers") or 0
    return config.predicting(fields.where, count, layer_of(config.num_layers))


def read_attention(fields: Fields, rope: RopeConfig, *, neighbours: bool) -> Mla:
    """Latent attention; YaRN's mscale is in its scale."""
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    mscale = 0.1 * (rope.mscale_all_dim or 0.0) * math.log(rope.factor) + 1.0 if rope.kind == "yarn" else 1.0
    return Mla(
        layer=0,
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.optional_integer("q_lora_rank") or None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        eps=fields.number("rms_norm_eps", above=True),
        scale=float((nope_dim + rope_dim) ** -0.5 * mscale**2),
        bias=fields.boolean("attention_bias", False),
        neighbours=neighbours,
    )


def read_layers(
    fields: Fields,
    attention: Mla | Gqa,
    gguf_norm: str,
    *,
    has_bias: bool,
    group_score: Literal["max", "top_two_sum"] | None = None,
) -> Callable[[int], tuple[Block, ...]]:
    """Blocks by layer: `attention`, and the mixture or, in the first layers, a dense feed-forward block.

    gguf_norm: name of the second norm in GGUF files. has_bias: V3's router, see the module. group_score: None: that of
    V2 or V3.
    """
    hidden, eps = attention.hidden_size, attention.eps
    groups = fields.data.get("topk_method") != "greedy"
    router = Router(
        layer=0,
        hidden_size=hidden,
        num_experts=fields.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=fields.integer("num_experts_per_tok"),
        eps=eps,
        renormalise=fields.boolean("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor") or 1.0,
        score="sigmoid" if has_bias else "softmax",
        bias=has_bias,
        num_groups=fields.integer("n_group", 1) if groups else 1,
        top_groups=fields.integer("topk_group", 1) if groups else 1,
        group_score=group_score or ("top_two_sum" if has_bias else "max"),
        gguf_norm=gguf_norm,
    )
    inner = fields.integer("moe_intermediate_size")
    num_shared = fields.optional_integer("num_shared_experts") or 0
    shared = (SharedExperts(0, hidden, num_shared * inner),) if num_shared else ()
    mixture = (router, *shared, config_json.experts_of(router, inner))
    dense = DenseFfn(0, hidden, fields.integer("intermediate_size"), eps, gguf_norm=gguf_norm)
    first, every = fields.integer("first_k_dense_replace", minimum=0), fields.integer("moe_layer_freq", 1)
    return lambda n: (attention, *mixture) if n >= first and n % every == 0 else (attention, dense)


def gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "deepseek2" in config.json's format. Raises ModelLoadError naming file and key."""
    fields, rope_dim = metadata.fields, metadata.fields.integer("rope.dimension_count")
    # Early files lack the key; only a router of sigmoids has a bias of its choice.
    has_bias = any(".exp_probs_b" in name for name in metadata.file.tensors)
    is_v3 = (fields.integer("expert_gating_func", 0, minimum=0) or _SIGMOID * has_bias) == _SIGMOID
    rope = metadata.rope_parameters()
    if weight := fields.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1:  # of mscale_all_dim
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    mixture = gguf_mixture(metadata, num_shared=0, num_dense=0, renormalise=False)
    method = "greedy" if mixture["n_group"] == 1 else "group_limited_greedy"
    # The second key of a pair is that of older files.
    return {
        "architectures": [_V3 if is_v3 else _V2],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "rope_parameters": rope,
        "num_attention_heads": fields.integer("attention.head_count"),
        "num_key_value_heads": fields.integer("attention.head_count"),
        "q_lora_rank": fields.optional_integer("attention.q_lora_rank") or None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": fields.integer(("attention.key_length_mla", "attention.key_length")) - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": fields.integer(("attention.value_length_mla", "attention.value_length")),
        "topk_method": "noaux_tc" if is_v3 else method,
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        **mixture,
        "values_of_gguf": True,
    }


def gguf_mixture(
    metadata: GgufMetadata, *, num_shared: int, num_dense: int, renormalise: bool
) -> dict[str, Any]:
    """What `read_layers` reads, from a GGUF file with these defaults."""
    fields = metadata.fields
    return {
        **metadata.experts("n_routed_experts"),
        "n_shared_experts": fields.integer("expert_shared_count", num_shared, minimum=0),
        "intermediate_size": fields.integer("feed_forward_length"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", num_dense, minimum=0),
        "norm_topk_prob": fields.boolean("expert_weights_norm", renormalise),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
    }
