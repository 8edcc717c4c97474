"""Families with latent attention (DeepSeek's), by name.

V2 routes by softmax, within the groups with the best expert. V3 routes by sigmoid and a bias, within the groups with
the largest sum of their two best. References: transformers `models/NAME`; for `moe_layer_freq` the published code.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.query_scale import QueryScale
from twofold.blocks.attention.rotation import PAIRED, Rotation
from twofold.blocks.mla import Mla
from twofold.blocks.residual import GatedNorms, PostNorms, Streams
from twofold.blocks.stream_mixes import WeightedStreams
from twofold.models.config_json import num_layers_of
from twofold.models.decoder import Decoder, MtpLayer, TextPart
from twofold.models.families.grouped_query import SIGMOID
from twofold.models.gguf_config import GgufMetadata
from twofold.models.indexers import indexer_of_gguf
from twofold.models.keys import FromConfig, Settings, of_gguf
from twofold.weights.json_file import Fields

_SIGMOID_SCORE: Final = 2
_MLP_BIAS: Final[dict[str, tuple[object, ...]]] = {"mlp_bias": (False, None)}


def one_group(fields: Fields) -> dict[str, Any]:
    """V2's groups count unless the choice is greedy."""
    # transformers and the published code disagree about the effect of normalising on V2's weights.
    if not fields.boolean("values_of_gguf", False):
        fields.only("norm_topk_prob", False, None)
    return {"n_group": 1, "topk_group": 1} if fields.data.get("topk_method") == "greedy" else {}


def _first_is_dense(fields: Fields) -> dict[str, Any]:
    """GLM-4.7-Flash's kinds of layers without a list: dense is the first."""
    if fields.data.get("mlp_layer_types") is not None:
        return {}
    return {"mlp_layer_types": ["dense"] + ["sparse"] * (num_layers_of(fields) - 1)}


def _by_position(settings: Settings, layer: int, attention: Mla) -> Mla:
    """Mistral 4's attention: queries are scaled by position."""
    section = settings.fields.section(("rope_parameters", "rope_scaling"))
    slope = None if section is None else section.optional_number("llama_4_scaling_beta")
    if section is None or not slope:
        return attention
    period = section.integer("original_max_position_embeddings")
    return replace(attention, scale=QueryScale(period, slope, shift=0))


def _gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """A GGUF file of architecture "deepseek2": V2, V3 and what routes like V3."""
    fields, rope_dim = metadata.fields, metadata.fields.integer("rope.dimension_count")
    # Early files lack the key; only a router of sigmoids has a bias of its choice.
    has_bias = any(".exp_probs_b" in name for name in metadata.file.tensors)
    score = fields.integer("expert_gating_func", 0, minimum=0) or _SIGMOID_SCORE * has_bias
    is_v3 = score == _SIGMOID_SCORE
    rope = metadata.rope_parameters()
    if weight := fields.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1:  # of mscale_all_dim
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    mixture = of_gguf(
        fields, "num_shared_experts", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"
    )
    method = "greedy" if mixture["n_group"] == 1 else "group_limited_greedy"
    # The second key of a pair is that of older files.
    return {
        "architectures": [f"DeepseekV{3 if is_v3 else 2}ForCausalLM"],
        "model_type": f"deepseek_v{3 if is_v3 else 2}",
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
        **metadata.experts(),
        **mixture,
        "intermediate_size": fields.integer("feed_forward_length"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, minimum=0),
    }


def _sparse_gguf(architecture: str, model_type: str, metadata: GgufMetadata) -> dict[str, Any]:
    """The same of a family with an indexer."""
    known = {"architectures": [architecture], "model_type": model_type}
    return _gguf(metadata) | known | indexer_of_gguf(metadata)


def _hy_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """The same of HY-4, with its streams. llama.cpp pairs neighbours where transformers rotates halves."""
    fields = metadata.fields
    dense = fields.integer("leading_dense_block_count", 0, minimum=0)
    return _sparse_gguf("HYV4ForCausalLM", "hy_v4", metadata) | {
        "hc_mult": fields.integer("hyper_connection.count", minimum=2),
        "hc_eps": fields.number("hyper_connection.epsilon"),
        "hc_magnitude": fields.number("hyper_connection.magnitude"),
        "swiglu_limit": fields.number("swiglu_clamp_exp", 0.0),
        "mlp_layer_types": ["dense" if n < dense else "sparse" for n in range(metadata.num_layers)],
    }


def _mistral_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """The same of Mistral 4, with its temperature."""
    fields, settings = metadata.fields, _gguf(metadata)
    rope = settings["rope_parameters"]
    if slope := fields.number("attention.temperature_scale", 0.0):
        usual = rope.get("original_max_position_embeddings", fields.integer("context_length"))
        length = fields.integer("attention.temperature_length", usual)
        rope |= {"llama_4_scaling_beta": slope, "original_max_position_embeddings": length}
    return settings | {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}


def _hy_layers(fields: Fields) -> dict[str, Any]:
    """HY-4's kinds of layers without lists: dense is the first, and three of four layers share positions."""
    return _first_is_dense(fields) | {"index_topk_freq": 4}


def _hy_streams(fields: Fields) -> Streams:
    mix = WeightedStreams(
        num_streams=fields.integer("hc_mult", 4, minimum=2),
        hidden_size=fields.integer("hidden_size"),
        eps=fields.number("rms_norm_eps", above=True),
        offset=fields.number("hc_eps", 1e-6),
        magnitude=fields.number("hc_magnitude", 2.0),
    )
    return Streams(mix)


_HY_NAMES: Final = (
    ("*.self_attn.learnable_sink_param", "*.self_attn.sinks"), ("*.linear_gate.", "*.gate_proj."),
    ("*.hc_pre.hc_", "*.hc_"), ("*.hc_attn_layer.hc_", "*.attn_hc."), ("*.hc_mlp_layer.hc_", "*.ffn_hc."),
    ("*.hc_head_", "*.hc_"),
)  # fmt: skip


def _without_groups(fields: Fields) -> dict[str, Any]:
    """A.X-K2's groups of experts, null in files without any."""
    return {} if fields.data.get("n_group") is not None else {"n_group": 1, "topk_group": 1}


def _gated_norms(fields: Fields) -> GatedNorms:
    return GatedNorms(
        fields.integer("hidden_size"),
        fields.number("rms_norm_eps", above=True),
        fields.integer("gated_norm_rank", 16, minimum=1),
    )


_V3: Final = Decoder(
    "DeepSeek-V3 and Kimi-K2: latent attention, sigmoid router with groups, shared experts, dense "
    "layers at the beginning.",
    "deepseek_v3",
    only={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), **_MLP_BIAS},
    latent=True,
    attention={"rotation": {"neighbours": FromConfig("rope_interleave", True)}},
    router=SIGMOID,
    mtp=MtpLayer(),
    gguf_whole=_gguf,
)
_V32: Final = replace(
    _V3,
    summary="DeepSeek-V3.2: DeepSeek-V3 with an indexer that chooses `index_topk` positions for each query.",
    model_type="deepseek_v32",
    only={**_V3.only, "rope_interleave": (True, None)},
    indexer=Rotation(),
    gguf_whole=partial(_sparse_gguf, "DeepseekV32ForCausalLM", "deepseek_v32"),
)
LATENT: Final = {
    "deepseek_v3": _V3,
    "deepseek_v2": replace(
        _V3,
        summary="DeepSeek-V2: latent attention, softmax router with groups, shared experts, dense layers at the "
                "beginning.",
        model_type="deepseek_v2",
        only={"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",), **_MLP_BIAS},
        restated=one_group,
        attention={},
        router={"group_score": "max"},
    ),
    "deepseek_v32": _V32,
    "glm_moe_dsa": replace(
        _V32,
        summary="GLM-5: DeepSeek-V3.2's blocks; layers may share an earlier layer's chosen positions.",
        model_type="glm_moe_dsa",
        indexer=PAIRED,
        gguf_whole=partial(_sparse_gguf, "GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    ),
    "hy_v4": replace(
        _V32,
        summary="Hunyuan 4 (HY-4): DeepSeek-V3.2's indexer, attention with gates and sinks, and several residual "
                "streams joined by hyper-connections.",
        model_type="hy_v4",
        only=_MLP_BIAS,
        restated=_hy_layers,
        attention={
            "rotation": Rotation(), "scores": {"sinks": True}, "gate": Gate("gate_proj"),
        },
        indexer_parts={"rotates_last": True, "key_eps": FromConfig("rms_norm_eps", 1e-5)},
        residual=_hy_streams,
        experts={"activation": "silu_of_limited", "limit": FromConfig("swiglu_limit", 10.0)},
        mtp=None,
        renamed=_HY_NAMES,
        left_out=(("multi-token prediction", "model.mtp_layers.*"),),
        gguf_whole=_hy_gguf,
    ),
    "glm4_moe_lite": replace(
        _V3,
        summary="GLM-4.7-Flash: DeepSeek-V3's blocks under another name.",
        model_type="glm4_moe_lite",
        restated=_first_is_dense,
    ),
    "axk1": replace(
        _V3,
        summary="A.X-K1: DeepSeek-V3 with a norm of the experts' output.",
        model_type="axk1",
        residual=PostNorms(feed_forward=("post_mlp_layernorm", ""), experts_alone=True),
        renamed=(("*.mlp.post_mlp_layernorm", "*.post_mlp_layernorm"),),
    ),
    "axk2": replace(
        _V32,
        summary="A.X-K2: DeepSeek-V3.2's indexer, norms with gates, and a gate of each element of the heads.",
        model_type="axk2",
        only={},
        restated=_without_groups,
        attention={"normed": False, "raw_queries": True, "gate": Gate()},
        residual=_gated_norms,
        router={**SIGMOID, "norm": None, "zero_others": True},
        mtp=None,
        renamed=(
            ("*.self_attn.q_gate_proj.", "*.self_attn.q_b_proj."),
            ("*.W_down.", "*.mlp.fc1."), ("*.W_up.", "*.mlp.fc2."),
        ),
        gguf_whole=None,
    ),
    "kimi_k25": replace(
        _V3,
        summary="Kimi-K2.5 and later: the text part, a DeepSeek-V3 with a nested configuration.",
        text=TextPart(
            (("language_model.", ""), ("model.language_model.", "model.")),
            tuple(f"{at}{part}.*" for at in ("", "model.") for part in ("vision_tower", "mm_projector")),
        ),
    ),
    "mistral4": Decoder(
        "Mistral 4: DeepSeek's latent attention, queries scaled by position, softmax router by groups' "
        "two best experts.",
        "mistral4",
        only={"model_type": ("mistral4",)},
        latent=True,
        attention={"rotation": {"neighbours": FromConfig("rope_interleave", True)}},
        of_layer=_by_position,
        rotated_share=1.0,
        text=TextPart(
            (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", "")),
            tuple(f"{at}{part}.*" for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        ),
        gguf_whole=_mistral_gguf,
    ),
}  # fmt: skip
