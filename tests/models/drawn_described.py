"""Families described by `models.decoder.Decoder`: one example of each with its corners.

`EXAMPLES` is the only table of tests that such a family needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from tests.tiny_models.described import TinyDescribed

# Settings that one value alone is supported of.
NOT_DRAWN: Final = {"solar_open": ("first_k_dense_replace",)}
SLIDING, FULL = "sliding_attention", "full_attention"
_GROUPS: Final = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_MLA: Final = {
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_shared_experts": 1,
}  # fmt: skip
_INDEXER: Final = {"index_topk": 128, "index_n_heads": 2, "index_head_dim": 16}


def _of(architecture: str, model_type: str, **also: Any) -> TinyDescribed:
    sizes = {"top_k": 4} if also.get("sparse", True) else {}
    return TinyDescribed(architecture=architecture, model_type=model_type, **sizes | also)


def _by_kind(full: float, sliding: float, share: float, sliding_share: float | None = None) -> dict[str, Any]:
    """Rotations by kind of layer. sliding_share: as `share`, of layers with a window, if it differs."""
    return {
        FULL: {"rope_type": "default", "rope_theta": full, "partial_rotary_factor": share},
        SLIDING: {
            "rope_type": "default",
            "rope_theta": sliding,
            "partial_rotary_factor": sliding_share or share,
        },
    }


def _gemma3(architecture: str, **settings: Any) -> TinyDescribed:
    ropes = {
        FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = [SLIDING, FULL, SLIDING, SLIDING]
    return _of(
        architecture, "gemma3_text", experts_key="", num_layers=4, hidden_size=64,
        settings=settings | {
            "sliding_window": 9, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": kinds, "rope_parameters": ropes,
        },
    )  # fmt: skip


EXAMPLES: dict[str, TinyDescribed] = {
    "dots1": _of(
        "Dots1ForCausalLM", "dots1", experts_key="n_routed_experts", gguf="dots1", scores="SIGMOID",
        settings=_GROUPS | {"n_shared_experts": 2, "first_k_dense_replace": 1,
                            "sliding_window": None},
    ),
    "solar_open": _of(
        "SolarOpenForCausalLM", "solar_open", experts_key="n_routed_experts", gguf="glm4moe", scores="SIGMOID",
        settings=_GROUPS | {"n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    "hy_v3": _of(
        "HYV3ForCausalLM", "hy_v3", gguf="hy_v3", scores="SIGMOID",
        settings={"num_shared_experts": 2, "router_scaling_factor": 2.8,
                  "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "mellum": _of(
        "MellumForCausalLM", "mellum", gguf="mellum",
        settings={
            "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                FULL: {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3_vl_moe": _of(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", outer="qwen3_vl_moe", expert_layout="fused",
        gguf="qwen3vlmoe", moe_intermediate_size=20,
        settings={"mlp_only_layers": [1], "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        }},
    ),
    "glm4v_moe": _of(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe_text", outer="glm4v_moe", attention_bias=True,
        experts_key="n_routed_experts",
        settings=_GROUPS | {
            "n_shared_experts": 1, "first_k_dense_replace": 1, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
            },
        },
    ),
    "exaone_moe": _of(
        "ExaoneMoeForCausalLM", "exaone_moe", gguf="exaone-moe", scores="SIGMOID",
        settings=_GROUPS | {"num_shared_experts": 1, "sliding_window": 9,
                            "sliding_window_pattern": 2},
    ),
    "flint": _of(
        "FlintForCausalLM", "flint", num_layers=5,
        settings={"mlp_only_layers": [0], "shared_expert_intermediate_size": 40, "sliding_window": 9},
    ),
    "llama": _of("LlamaForCausalLM", "llama", experts_key="", gguf="llama", neighbours_in_gguf=True),
    "mistral": _of(
        "MistralForCausalLM", "mistral", experts_key="", gguf="llama", neighbours_in_gguf=True, has_biases=False,
        settings={"sliding_window": None},
    ),
    "qwen2": _of("Qwen2ForCausalLM", "qwen2", experts_key="", gguf="qwen2", has_biases=False),
    "deepseek_v32": _of(
        "DeepseekV32ForCausalLM", "deepseek_v32", gguf="deepseek32", scores="SIGMOID",
        settings=_MLA | _GROUPS | {"first_k_dense_replace": 1, **_INDEXER},
        experts_key="n_routed_experts", left_out=("head_dim",), num_kv_heads=4, has_biases=False,
    ),
    "glm_moe_dsa": _of(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", gguf="glm-dsa", scores="SIGMOID",
        settings=_MLA | {"routed_scaling_factor": 2.5, "norm_topk_prob": True,
                         "mlp_layer_types": ["dense", "sparse", "sparse"], "index_topk_pattern": "FSF", **_INDEXER},
        experts_key="n_routed_experts", left_out=("head_dim",), num_kv_heads=4, has_biases=False,
    ),
    "axk1": _of(
        "AXK1ForCausalLM", "axk1", settings=_MLA | _GROUPS | {"first_k_dense_replace": 1},
        experts_key="n_routed_experts", left_out=("head_dim",), num_kv_heads=4, has_biases=False,
    ),
    "granitemoe_swa": _of(
        "GraniteMoeSWAForCausalLM", "granitemoe_swa", gguf="granite_swa", neighbours_in_gguf=True,
        experts_key="num_local_experts", num_layers=4,
        left_out=("moe_intermediate_size", "head_dim"), head_dim=12, expert_layout="fused",
        settings={
            "intermediate_size": 32, "shared_intermediate_size": 40, "sliding_window": 9, "residual_multiplier": 0.5,
            "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "logits_scaling": 2.0,
            "layer_types": [FULL, SLIDING, SLIDING, FULL], "layer_rope_theta": [0, 1e4, 5e5, 5e5],
        },
    ),
    "seed_oss": _of(
        "SeedOssForCausalLM", "seed_oss", experts_key="", gguf="seed_oss", attention_bias=True,
        settings={"attention_out_bias": False},
    ),
    "gemma3": replace(
        _gemma3("Gemma3ForCausalLM", tie_word_embeddings=False, final_logit_softcapping=30.0),
        gguf="gemma3", head_dim=24,
    ),
    "gemma3_vision": replace(
        _gemma3("Gemma3ForConditionalGeneration"), outer="gemma3", text_prefix="language_model.model.",
        tie_word_embeddings=True, vision_tensor="vision_tower.vision_model.embeddings.patch_embedding.bias",
    ),
    "qwen3": _of("Qwen3ForCausalLM", "qwen3", experts_key="", gguf="qwen3"),
    "hunyuan_v1_moe": _of(
        "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", gguf="hunyuan-moe", left_out=("moe_intermediate_size",),
        moe_intermediate_size=64,
        settings={"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan_v1_dense": _of("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", experts_key="", gguf="hunyuan-dense"),
    "mimo_v2_flash": _of(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", gguf="mimo2", scores="SIGMOID",
        experts_key="n_routed_experts", head_dim=12, num_heads=4,
        num_kv_heads=2,
        settings=_GROUPS | {
            "v_head_dim": 8, "sliding_window": 9, "layer_types": [FULL, SLIDING, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse"], "attention_value_scale": 0.707,
            "rope_parameters": _by_kind(5e6, 1e4, 0.334),
        },
    ),
    "afmoe": _of(
        "AfmoeForCausalLM", "afmoe", gguf="afmoe", scores="SIGMOID",
        settings={
            "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.7, "sliding_window": 9,
            "global_attn_every_n_layers": 2, "mup_enabled": True,
        },
    ),
    "laguna": _of(
        "LagunaForCausalLM", "laguna", gguf="laguna", scores="SIGMOID", num_heads=4, num_kv_heads=2,
        settings={
            "num_attention_heads_per_layer": [4, 2, 6], "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 9,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 1.7, "moe_router_logit_softcapping": 0.7, "gating": "per-head",
            "rope_parameters": _by_kind(5e5, 1e4, 0.5),
        },
    ),
    "flex_olmo": _of(
        "FlexOlmoForCausalLM", "flex_olmo", left_out=("moe_intermediate_size",), settings={"pad_token_id": 1},
    ),
    "qwen3_omni_moe": _of(
        "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_text", outer="qwen3_omni_moe_thinker",
        vision_tensor="model.visual.patch_embed.proj.bias",
        outer_settings={"vision_start_token_id": 319, "audio_start_token_id": 318, "audio_token_id": 317,
                        "image_token_id": 316, "video_token_id": 315},
        settings={"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        }},
    ),
    "step3p7": _of(
        "Step3p7ForConditionalGeneration", "step3p5", outer="step3p7", experts_key="n_routed_experts",
        expert_layout="fused", vision_tensor="model.vision_model.pre_layernorm.bias", num_heads=4, num_kv_heads=2,
        gguf="step35", scores="SIGMOID",
        settings={
            "layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 9, "num_sliding_attention_heads": 6,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "share_expert_dim": 40,
            "moe_router_scaling_factor": 1.7, "rope_parameters": _by_kind(5e6, 1e4, 0.5, 1.0),
            "swiglu_limits": [0.0, None, 0.4], "swiglu_limits_shared": [0.3, 0.0, 0.5],
        },
    ),
    "ernie4_5_vl_moe": _of(
        "Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe_text", outer="ernie4_5_vl_moe", head_dim=16,
        hidden_size=64, num_heads=4, num_kv_heads=2, experts_key="moe_num_experts", has_biases=False,
        left_out=("head_dim",),
        text_prefix="model.", vision_tensor="vision_model.ln.bias",
        settings={
            "moe_intermediate_size": [24, 12], "moe_num_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2],
            },
        },
    ),
    "mistral4": _of(
        "Mistral4ForCausalLM", "mistral4", gguf="mistral4", experts_key="n_routed_experts", left_out=("head_dim",),
        num_kv_heads=4,
        has_biases=False, expert_layout="fused",
        settings=_MLA | _GROUPS | {"first_k_dense_replace": 1, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
            "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.6,
        }},
    ),
}  # fmt: skip
# Keys that have no counterpart in other families: how they are drawn, from the sizes of the configuration.
FURTHER: Final[dict[str, Callable[[random.Random, TinyDescribed], dict[str, Any]]]] = {
    "hunyuan_v1_moe": lambda r, model: r.choice(
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    ),
    "mimo_v2_flash": lambda r, model: {
        "v_head_dim": r.randint(1, model.head_dim), "attention_value_scale": r.choice((0.707, 1.0, 2.0)),
        "rope_parameters": _by_kind(5e6, 1e4, r.choice((0.25, 0.5, 1.0))),
    },
    "afmoe": lambda r, model: {
        "num_dense_layers": r.randint(0, 1), "global_attn_every_n_layers": r.choice((2, 3)),
        "mup_enabled": r.random() < 0.5,
    },
    "step3p7": lambda r, model: {
        "num_sliding_attention_heads": model.num_kv_heads * r.randint(1, 3), "share_expert_dim": r.randint(5, 70),
        "moe_router_scaling_factor": r.choice((1.0, 3.0)),
        **{f"swiglu_limits{part}": r.choice((None, [r.choice((0.0, 0.2, 1.0)) for _ in range(model.num_layers)]))
           for part in ("", "_shared")},
        "rope_parameters": _by_kind(5e6, 1e4, r.choice((0.5, 0.5, 1.0)), r.choice((0.5, 1.0, 1.0))),
    },
    "laguna": lambda r, model: {
        "num_attention_heads_per_layer": [model.num_kv_heads * r.randint(1, 3) for _ in range(model.num_layers)],
        "moe_router_logit_softcapping": r.choice((0.0, 0.7, 5.0)),
        "gating": r.choice((True, "per-head", "per-element")),
        "rope_parameters": _by_kind(5e5, 1e4, r.choice((0.25, 0.5, 1.0))),
    },
}  # fmt: skip


def drawn(name: str, r: random.Random, sizes: Mapping[str, Any], groups: Mapping[str, Any]) -> TinyDescribed:
    """A random configuration of the family: every key of its example gets another value."""
    base, sizes = EXAMPLES[name], dict(sizes)
    if "n_group" in base.settings:
        sizes |= {key: groups[key] for key in ("num_experts", "top_k")}
    if base.outer or "rope_parameters" in base.settings:
        sizes |= {"rope_scaling": None, "rope_theta": 1e4, "head_dim": 8 * r.randint(1, 4)}
    if base.outer:
        sizes["head_dim"] = base.head_dim  # mrope_section fits this one
    if "kv_lora_rank" in base.settings:
        sizes["num_kv_heads"] = sizes["num_heads"]
    if base.model_type in ("gemma3_text", "llama"):  # transformers refuses other sizes
        sizes["hidden_size"] = sizes["num_heads"] * r.randint(3, 9)
    if base.model_type == "gemma3_text":
        sizes["tie_word_embeddings"] = base.tie_word_embeddings
    if base.outer and sizes["moe_intermediate_size"] * 2 == sizes["hidden_size"]:
        sizes["hidden_size"] += 1  # the orientation of fused experts could not be told
    if name == "mimo_v2_flash":  # windows have twice as many KV heads
        sizes["num_heads"] = 2 * sizes["num_kv_heads"]
    if name == "hunyuan_v1_moe":  # experts have one of the two sizes
        sizes["moe_intermediate_size"] = sizes["intermediate_size"]
    if name == "ernie4_5_vl_moe":  # the only one that is published
        sizes["expert_layout"] = "separate"
    if "intermediate_size" in base.settings or name == "ernie4_5_vl_moe":  # heads fill the hidden size, too
        sizes["hidden_size"] = sizes["num_heads"] * sizes["head_dim"]
    if base.expert_layout == "fused":  # the only one that is published
        sizes["expert_layout"] = "fused"
    layers = sizes["num_layers"]
    sparse = r.randrange(layers)
    choices: dict[str, Any] = {
        "n_group": groups["num_groups"], "topk_group": groups["top_groups"], "n_shared_experts": r.randint(1, 3),
        "num_shared_experts": r.randint(1, 3), "routed_scaling_factor": r.choice((1.0, 1.7, 2.5)),
        "router_scaling_factor": r.choice((1.0, 1.7)), "norm_topk_prob": r.random() < 0.5,
        "first_k_dense_replace": r.randint(0, 1), "shared_expert_intermediate_size": r.randint(5, 70),
        "sliding_window": r.choice((3, 9, 20)), "max_window_layers": r.randint(0, 3),
        "sliding_window_pattern": r.choice((2, 3)), "mlp_only_layers": r.choice(([0], [1])),
        "index_topk_pattern": "F" + "".join(r.choice("FS") for _ in range(layers - 1)),
        "layer_rope_theta": [r.choice((0, 1e4, 5e5)) for _ in range(layers)],
        "layer_types": [r.choice((SLIDING, FULL)) for _ in range(layers)],
        "mlp_layer_types": ["sparse" if n == sparse else r.choice(("dense", "sparse")) for n in range(layers)],
    }  # fmt: skip
    if "kv_lora_rank" in base.settings:  # dense layers come first
        choices["mlp_layer_types"].sort()
    fixed = NOT_DRAWN.get(name, ())
    changed = {key: choices[key] for key in base.settings if key in choices and key not in fixed}
    model = replace(base, **sizes, attention_bias=r.random() < 0.5 and base.has_biases).with_settings(
        **changed
    )
    return model.with_settings(**FURTHER[name](r, model)) if name in FURTHER else model
