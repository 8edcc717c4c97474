"""All families: one tiny model of each with its special cases. Every test of families takes its models from here.

A row has what transformers reads of config.json, and what no block knows: names of sizes, multimodal models, GGUF's.
"""

from __future__ import annotations

from typing import Any, Final

from tests.tiny_models.family import Row, TinyFamily
from tests.tiny_models.writing import BLOCK_SPARSE_MOE, MLP, TinyModel

SLIDING, FULL = "sliding_attention", "full_attention"
YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3: Final = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_GROUPS: Final = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_TWELVE: Final = {"num_experts": 12, "top_k": 5}
_ROUTED: Final = {"num_experts": "n_routed_experts"}
_LOCAL: Final = {
    "num_experts": "num_local_experts",
    "moe_intermediate_size": "intermediate_size",
    "intermediate_size": "",
}
_DENSE: Final = {"num_experts": "", "num_experts_per_tok": "", "moe_intermediate_size": ""}
_NO_BIAS: Final = {"attention_bias": ""}
_LATENT_KEYS: Final = _ROUTED | {"head_dim": ""}
_LATENT: Final = {
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_shared_experts": 1, "num_kv_heads": 4,
}  # fmt: skip
_V3: Final = _LATENT | {
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "rope_interleave": True,
}  # fmt: skip
_INDEXER: Final = {"index_topk": 12, "index_n_heads": 6, "index_head_dim": 16}
_SHARED_INDEXER: Final = ("model.layers.1.self_attn.indexer.k_norm.weight", 16)
_W: Final = {"separate": (BLOCK_SPARSE_MOE,), "fused": (MLP,)}


def _of(architecture: str, row: Row, **changed: Any) -> TinyFamily:
    return TinyFamily(architecture=architecture, row=row).changed(**changed)


def by_kind(full: float, sliding: float, share: float, sliding_share: float | None = None) -> dict[str, Any]:
    """Rotations by kind of layer. sliding_share: as `share`, of layers with a window, if it differs."""
    return {
        FULL: {"rope_type": "default", "rope_theta": full, "partial_rotary_factor": share},
        SLIDING: {
            "rope_type": "default",
            "rope_theta": sliding,
            "partial_rotary_factor": sliding_share or share,
        },
    }


def _sections(*sizes: int, **also: Any) -> dict[str, Any]:
    """Rotation of a multimodal model's positions."""
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes), **also}
    }


def linear_layers(num_layers: int, *full: int, kind: str = "linear_attention") -> list[str]:
    """`layer_types` of a model with full attention in these layers."""
    return [FULL if n in full else kind for n in range(num_layers)]


_GEMMA3: Final = {
    "num_layers": 4, "hidden_size": 64, "sliding_window": 9, "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh", "layer_types": [SLIDING, FULL, SLIDING, SLIDING],
    "rope_parameters": {
        FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
_GEMMA4_ROW: Final = Row(
    "gemma4_text", keys={"num_experts_per_tok": "", "hidden_act": ""}, outer="gemma4",
    outer_class="Gemma4ForConditionalGeneration", has_small_vision=False,
    means={"post_": 0.5, "q_norm": 0.5, "k_norm": 0.5}, small_embedding=True,
    vision_tensor="model.vision_tower.patch_embedder.input_proj.weight", gguf="gemma4", scores="",
)  # fmt: skip
_GEMMA4: Final = {
    "tie_word_embeddings": True, "head_dim": 12, "expert_layout": "fused", "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": 24, "num_global_key_value_heads": 1, "layer_types": [SLIDING, FULL, FULL], "sliding_window": 7,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "attention_k_eq_v": True, "enable_moe_block": True, "top_k_experts": 3, "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 323, "num_experts": 9, "top_k": 3,
}  # fmt: skip
_NEXT: Final = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25, "shared_expert_intermediate_size": 40, "has_mtp": True,
}  # fmt: skip
_GRANITE: Final = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125, "logits_scaling": 3.0,
    "num_experts": 9,
}  # fmt: skip
_GRANITE_STORED: Final = {
    "separate": ("input_linear.", "router.layer"),
    "fused": ("experts.gate_up_proj", "shared_mlp.input_linear", "router.weight"),
}  # fmt: skip
_KIMI_NAMES: Final = {
    "outer": "kimi_k25", "outer_class": "KimiK25ForConditionalGeneration", "has_small_vision": False,
    "prefix": ("", "language_model."), "vision_tensor": "vision_tower.patch_embed.proj.bias",
}  # fmt: skip

_OCR2_VISION: Final = {
    "sam_config": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 16, "image_size": 64,
        "global_attn_indexes": [0], "downsample_channels": [16, 16],
    },
    "encoder_config": {
        "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}  # fmt: skip
_HY_NAMES: Final = (
    ("*.self_attn.sinks", "*.self_attn.learnable_sink_param"), ("*.self_attn.gate_proj.", "*.self_attn.linear_gate."),
    ("*.attn_hc.", "*.hc_attn_layer.hc_pre.hc_"), ("*.ffn_hc.", "*.hc_mlp_layer.hc_pre.hc_"),
    ("*.hc_head.hc_", "*.hc_head.hc_head_"),
)  # fmt: skip
_LARGE4_NAMES: Final = (
    ("*model.embed_tokens.", "*tok_embeddings."), ("*lm_head.", "*output."), ("*model.rotary_emb.", "*lerope."),
    ("*.self_attn.", "*.attention."), ("*.q_proj.", "*.wq."), ("*.kv_a_proj_with_mqa.", "*.wkv_a_with_mqa."),
    ("*.kv_b_proj.", "*.wkv_b."), ("*.o_proj.", "*.wo."), ("*.kv_a_layernorm.", "*.kv_a_norm."),
    ("*.input_layernorm.", "*.attention_norm."), ("*.post_attention_layernorm.", "*.ffn_norm."),
    ("*.softmax_scaling.scale", "*.ssmax_scaling.s"), ("*.softmax_scaling.bias", "*.ssmax_scaling.b"),
    *((f"*.mlp.{part}.", f"*.{part}.") for part in ("gate", "experts", "shared_experts")),
    ("*.mlp.", "*.feed_forward."), ("*.gate_proj.", "*.w1."), ("*.down_proj.", "*.w2."), ("*.up_proj.", "*.w3."),
)  # fmt: skip

GROUPED_QUERY: Final[dict[str, TinyModel]] = {
    "qwen3_moe": TinyModel(),
    "mixtral": TinyModel("MixtralForCausalLM"),
    "qwen2_moe": _of(
        "Qwen2MoeForCausalLM", Row("qwen2_moe", keys={"attention_bias": "qkv_bias"}, gguf="qwen2moe", scores=""),
        mlp_only_layers=(1,), top_k=3, num_experts=9, attention_bias=True, norm_topk_prob=False,
        shared_expert_intermediate_size=40, max_window_layers=28, decoder_sparse_step=1,
    ),
    "olmoe": _of(
        "OlmoeForCausalLM",
        Row("olmoe", keys={"head_dim": "", "moe_intermediate_size": "intermediate_size", "intermediate_size": ""},
            gguf="olmoe", scores=""),
        top_k=3, hidden_size=64, norm_topk_prob=False, clip_qkv=None,
    ),
    "glm4_moe": _of(
        "Glm4MoeForCausalLM", Row("glm4_moe", keys=_ROUTED, gguf="glm4moe", scores="SIGMOID"),
        **_TWELVE, **_GROUPS, use_qk_norm=True, n_shared_experts=2, head_dim=24, partial_rotary_factor=0.25,
        attention_bias=True, first_k_dense_replace=1,
    ),
    "gpt_oss": _of(
        "GptOssForCausalLM",
        Row("gpt_oss", keys=_LOCAL, gguf="gpt-oss", scores="",
            stored=dict.fromkeys(("separate", "fused"), ("experts.gate_up_proj",))),
        top_k=3, num_experts=9, attention_bias=True, sliding_window=9, swiglu_limit=7.0,
    ),
    "ernie4_5_moe": _of(
        "Ernie4_5_MoeForCausalLM",
        Row("ernie4_5_moe", keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k", **_NO_BIAS},
            renamed=(), bias_in_rows=True, gguf="ernie4_5-moe", scores="", mtp_in_gguf=False),
        num_layers=5, num_experts=9, top_k=4, use_bias=False, moe_num_shared_experts=2, moe_layer_start_index=1,
        moe_layer_end_index=-1, moe_layer_interval=2,
    ),
    "granitemoe": _of(
        "GraniteMoeForCausalLM", Row("granitemoe", keys=_LOCAL, stored=_GRANITE_STORED, gguf="granitemoe", scores=""),
        **_GRANITE, top_k=4,
    ),
    "granitemoe-shared": _of(
        "GraniteMoeSharedForCausalLM",
        Row("granitemoeshared", keys=_LOCAL, stored=_GRANITE_STORED, gguf="granitemoe", scores=""),
        **_GRANITE | {"num_experts": 8}, top_k=3, shared_intermediate_size=40,
    ),
    "granitemoe_swa": _of(
        "GraniteMoeSWAForCausalLM",
        Row("granitemoe_swa", keys={**_LOCAL, "head_dim": ""}, stored=_GRANITE_STORED, gguf="granite_swa",
            gguf_stored=("ffn_up_shexp",)),
        top_k=4, num_layers=4, head_dim=12, expert_layout="fused", moe_intermediate_size=32,
        shared_intermediate_size=40, sliding_window=9, residual_multiplier=0.5, embedding_multiplier=6.0,
        attention_multiplier=0.2, logits_scaling=2.0, layer_types=[FULL, SLIDING, SLIDING, FULL],
        layer_rope_theta=[0, 1e4, 5e5, 5e5],
    ),
    "minimax_m2": _of(
        "MiniMaxM2ForCausalLM",
        Row("minimax_m2", keys={**_LOCAL, **_NO_BIAS}, stored=_W, gguf="minimax-m2", scores="SIGMOID",
            mtp_in_gguf=False),
        num_experts=9, top_k=4, head_dim=24, rotary_dim=12, scoring_func="sigmoid", use_routing_bias=True,
    ),
    "minimax_m3": _of(
        "MiniMaxM3SparseForConditionalGeneration",
        Row("minimax_m3_vl_text", keys=_NO_BIAS | {
                "num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size",
                "intermediate_size": "dense_intermediate_size", "hidden_act": "",
            },
            stored={"separate": (r"\.experts\.\d+\.w",)},
            renamed=(
                ("*.mlp.gate.e_score_correction_bias", "*.block_sparse_moe.e_score_correction_bias"),
                *((f"*.mlp.{part}.", f"*.block_sparse_moe.{part}.") for part in ("gate", "experts", "shared_experts")),
                *((f"*.self_attn.indexer.{part}.", f"*.self_attn.index_{part}.")
                  for part in ("q_proj", "k_proj", "q_norm", "k_norm")),
            ),
            outer="minimax_m3_vl",
            prefix=("model.", "language_model.model."), means={"q_norm": 0.5, "k_norm": 0.5},
            vision_tensor="vision_tower.vision_model.pre_layrnorm.bias", gguf="minimax-m3", scores="SIGMOID"),
        nested=True, num_experts=9, top_k=4, head_dim=24, partial_rotary_factor=0.5, shared_intermediate_size=20,
        routed_scaling_factor=2.0, swiglu_limit=0.7, index_n_heads=2, index_head_dim=16, index_block_size=4,
        index_topk_blocks=3, index_local_blocks=1, layer_types=[FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "llama4": _of(
        "Llama4ForCausalLM",
        Row("llama4_text", keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size",
                                 "intermediate_size": "intermediate_size_mlp"},
            outer="llama4", outer_class="Llama4ForConditionalGeneration", has_small_vision=False,
            prefix=("", "language_model."), vision_tensor="vision_model.class_embedding",
            stored=dict.fromkeys(("separate", "fused"), ("experts.gate_up_proj",)), gguf="llama4", scores=""),
        num_layers=5, top_k=1, interleave_moe_layer_step=2, attention_chunk_size=12, floor_scale=8, attn_scale=0.6,
        no_rope_layer_interval=4, use_qk_norm=True, attn_temperature_tuning=True,
    ),
    "dots1": _of(
        "Dots1ForCausalLM", Row("dots1", keys=_ROUTED, gguf="dots1", scores="SIGMOID"),
        top_k=4, **_GROUPS, n_shared_experts=2, first_k_dense_replace=1, sliding_window=None,
    ),
    "solar_open": _of(
        "SolarOpenForCausalLM", Row("solar_open", keys=_ROUTED),
        top_k=4, **_GROUPS, n_shared_experts=1, first_k_dense_replace=0,
    ),
    "hy_v3": _of(
        "HYV3ForCausalLM", Row("hy_v3", gguf="hy_v3", scores="SIGMOID"),
        top_k=4, num_shared_experts=2, router_scaling_factor=2.8, mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "mellum": _of(
        "MellumForCausalLM", Row("mellum", gguf="mellum"),
        top_k=4, sliding_window=9, layer_types=[SLIDING, FULL, SLIDING], mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters={
            FULL: {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "exaone_moe": _of(
        "ExaoneMoeForCausalLM", Row("exaone_moe", renamed=(), gguf="exaone-moe", scores="SIGMOID"),
        top_k=4, **_GROUPS, num_shared_experts=1, sliding_window=9, sliding_window_pattern=2,
    ),
    "flint": _of(
        "FlintForCausalLM", Row("flint"),
        top_k=4, num_layers=5, mlp_only_layers=[0], shared_expert_intermediate_size=40, sliding_window=9,
    ),
    "hunyuan_v1_moe": _of(
        "HunYuanMoEV1ForCausalLM", Row("hunyuan_v1_moe", keys={"moe_intermediate_size": ""}, gguf="hunyuan-moe"),
        top_k=4, moe_intermediate_size=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    ),
    "mimo_v2_flash": _of(
        "MiMoV2FlashForCausalLM", Row("mimo_v2_flash", keys=_ROUTED, gguf="mimo2", scores="SIGMOID"),
        top_k=4, head_dim=12, **_GROUPS, v_head_dim=8, sliding_window=9, layer_types=[FULL, SLIDING, SLIDING],
        mlp_layer_types=["dense", "sparse", "sparse"], attention_value_scale=0.707,
        rope_parameters=by_kind(5e6, 1e4, 0.334),
    ),
    "afmoe": _of(
        "AfmoeForCausalLM", Row("afmoe", gguf="afmoe", scores="SIGMOID"),
        top_k=4, num_dense_layers=1, num_shared_experts=2, route_scale=1.7, sliding_window=9,
        global_attn_every_n_layers=2, mup_enabled=True,
    ),
    "laguna": _of(
        "LagunaForCausalLM", Row("laguna", gguf="laguna", scores="SIGMOID"),
        top_k=4, num_attention_heads_per_layer=[4, 2, 6], layer_types=[FULL, SLIDING, SLIDING], sliding_window=9,
        mlp_layer_types=["dense", "sparse", "sparse"], shared_expert_intermediate_size=40,
        moe_routed_scaling_factor=1.7, moe_router_logit_softcapping=0.7, gating="per-head",
        rope_parameters=by_kind(5e5, 1e4, 0.5),
    ),
    "flex_olmo": _of(
        "FlexOlmoForCausalLM", Row("flex_olmo", keys={"moe_intermediate_size": ""}),
        top_k=4, moe_intermediate_size=64, pad_token_id=1,
    ),
    "step3p7": _of(
        "Step3p7ForConditionalGeneration",
        Row("step3p5", keys=_ROUTED, outer="step3p7", vision_tensor="model.vision_model.pre_layernorm.bias",
            renamed=(), gguf="step35", scores="SIGMOID"),
        nested=True, top_k=4, expert_layout="fused", layer_types=[FULL, SLIDING, SLIDING], sliding_window=9,
        num_sliding_attention_heads=6, mlp_layer_types=["dense", "sparse", "sparse"], share_expert_dim=40,
        moe_router_scaling_factor=1.7, rope_parameters=by_kind(5e6, 1e4, 0.5, 1.0),
        swiglu_limits=[0.0, None, 0.4], swiglu_limits_shared=[0.3, 0.0, 0.5],
    ),
    "gemma4": _of("Gemma4ForCausalLM", _GEMMA4_ROW, **_GEMMA4),
    "gemma4-small": _of(
        "Gemma4ForCausalLM", _GEMMA4_ROW,
        **_GEMMA4 | {
            "enable_moe_block": False, "top_k_experts": None, "num_layers": 5, "hidden_size_per_layer_input": 10,
            "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True, "attention_k_eq_v": False,
        },
    ),
}  # fmt: skip
MULTIMODAL: Final = {
    "qwen3_vl_moe": _of(
        "Qwen3VLMoeForConditionalGeneration", Row("qwen3_vl_moe_text", outer="qwen3_vl_moe", gguf="qwen3vlmoe"),
        nested=True, expert_layout="fused", top_k=4, moe_intermediate_size=20, mlp_only_layers=[1],
        **_sections(4, 2, 2, mrope_interleaved=True),
    ),
    "qwen3_vl": _of(
        "Qwen3VLForConditionalGeneration", Row("qwen3_vl_text", keys=_DENSE, outer="qwen3_vl", gguf="qwen3vl"),
        nested=True, **_sections(4, 2, 2, mrope_interleaved=True),
    ),
    "glm4v_moe": _of(
        "Glm4vMoeForConditionalGeneration", Row("glm4v_moe_text", outer="glm4v_moe", keys=_ROUTED),
        nested=True, attention_bias=True, top_k=4, **_GROUPS, n_shared_experts=1, first_k_dense_replace=1,
        **_sections(2, 1, 1, partial_rotary_factor=0.5),
    ),
    "gemma3_vision": _of(
        "Gemma3ForConditionalGeneration",
        Row("gemma3_text", keys=_DENSE, outer="gemma3", prefix=("model.", "language_model.model."),
            vision_tensor="vision_tower.vision_model.embeddings.patch_embedding.bias"),
        nested=True, tie_word_embeddings=True, **_GEMMA3,
    ),
    "aria": _of(
        "AriaTextForCausalLM",
        Row("aria_text", outer="aria", outer_class="AriaForConditionalGeneration",
            prefix=("", "language_model."), has_small_vision=False,
            vision_tensor="vision_tower.vision_model.post_layernorm.bias",
            keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk", "moe_intermediate_size": ""}),
        nested=True, expert_layout="fused", top_k=4, moe_intermediate_size=64, moe_num_shared_experts=2,
    ),
    "deepseek_ocr2": _of(
        "DeepseekOcr2ForConditionalGeneration",
        Row("deepseek_ocr2_text", outer="deepseek_ocr2", keys=_ROUTED, prefix=("model.", "model."),
            vision_tensor="model.view_seperator", vision_settings=_OCR2_VISION, gguf="deepseek2-ocr"),
        nested=True, head_dim=12, top_k=4, n_shared_experts=2, n_group=1, topk_group=1, topk_method="greedy",
        routed_scaling_factor=1.7, mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "qwen3_omni_moe": _of(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        Row("qwen3_omni_moe_text", outer="qwen3_omni_moe_thinker", outer_settings={
            "vision_start_token_id": 319, "audio_start_token_id": 318, "audio_token_id": 317, "image_token_id": 316,
            "video_token_id": 315,
        }),
        nested=True, top_k=4, **_sections(4, 2, 2, mrope_interleaved=True),
    ),
    "ernie4_5_vl_moe": _of(
        "Ernie4_5_VLMoeForConditionalGeneration",
        Row("ernie4_5_vl_moe_text", outer="ernie4_5_vl_moe", renamed=(), prefix=("model.", "model."),
            vision_tensor="vision_model.ln.bias", images_inner=12, stored={"separate": (r"mlp\.experts\.\d",)},
            keys={"num_experts": "moe_num_experts", "moe_intermediate_size": "", "head_dim": "", **_NO_BIAS}),
        nested=True, hidden_size=64, top_k=4, moe_num_shared_experts=2,
        mlp_layer_types=["dense", "sparse", "sparse"], **_sections(3, 3, 2),
    ),
}  # fmt: skip
RECURRENT: Final = {
    "qwen3_next": _of(
        "Qwen3NextForCausalLM",
        Row("qwen3_next", stored={"": ("in_proj_qkvz", "in_proj_ba")}, gguf="qwen3next", scores="",
            gguf_stored=("ssm_ba",)),
        num_layers=5, layer_types=linear_layers(5, 1, 4), num_experts=9, top_k=3, mlp_only_layers=[2],
        norm_topk_prob=True, **_NEXT,
    ),
    "qwen3_5_moe": _of(
        "Qwen3_5MoeForCausalLM",
        Row("qwen3_5_moe_text", keys={"intermediate_size": ""}, outer="qwen3_5_moe",
            outer_class="Qwen3_5MoeForConditionalGeneration", has_small_vision=False, gguf="qwen35moe", scores=""),
        nested=True, expert_layout="fused", num_layers=4, layer_types=linear_layers(4, 3),
        mtp_num_hidden_layers=1, **_NEXT,
    ),
    "qwen3_5": _of(
        "Qwen3_5ForCausalLM",
        Row("qwen3_5_text", keys=_DENSE, outer="qwen3_5", outer_class="Qwen3_5ForConditionalGeneration",
            has_small_vision=False, gguf="qwen35", scores=""),
        nested=True, num_layers=4, layer_types=linear_layers(4, 3), mtp_num_hidden_layers=1,
        **{key: value for key, value in _NEXT.items() if key != "shared_expert_intermediate_size"},
    ),
    "qwen4_exp": _of(
        "Qwen4ExpForCausalLM",
        Row("qwen4_exp_text", keys={"intermediate_size": ""}, outer="qwen4_exp",
            outer_class="Qwen4ExpForConditionalGeneration", has_small_vision=False,
            stored={"": ("indexer.index_qk_proj",)}, gguf="qwen4exp", scores="",
            gguf_stored=("nextn.eh_proj", "per_layer_token_embd")),
        nested=True, expert_layout="fused", num_layers=4, layer_types=linear_layers(4, 1, 3), hc_count=3, hc_lowrank=20,
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=9, indexer_compress_ratio=3,
        output_gate_type="sigmoid", **_NEXT, ple_layer_ids=[1], ple_embed_dim=24, ple_conv_kernel_size=3, ngram_size=3,
        heads_per_ngram=2, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=3,
    ),
    "lfm2_moe": _of(
        "Lfm2MoeForCausalLM",
        Row("lfm2_moe", keys={"hidden_act": "", "rms_norm_eps": "norm_eps", **_NO_BIAS}, gguf="lfm2moe",
            scores="SIGMOID", gguf_stored=("token_embd_norm",)),
        num_experts=9, top_k=3, num_layers=4, tie_word_embeddings=True, layer_types=linear_layers(4, 1, 3, kind="conv"),
        conv_L_cache=3, conv_bias=True, num_dense_layers=1, use_expert_bias=True, routed_scaling_factor=1.0,
        norm_topk_prob=True,
    ),
}  # fmt: skip
LATENT: Final = {
    "deepseek_v3": _of(
        "DeepseekV3ForCausalLM", Row("deepseek_v3", keys=_LATENT_KEYS, gguf="deepseek2", scores="SIGMOID"),
        **_V3 | _TWELVE | _GROUPS, scoring_func="sigmoid", topk_method="noaux_tc",
        rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v2": _of(
        "DeepseekV2ForCausalLM", Row("deepseek_v2", keys=_LATENT_KEYS, gguf="deepseek2"),
        **{key: value for key, value in _V3.items() if key != "rope_interleave"}
        | {"q_lora_rank": None, "norm_topk_prob": False},
        scoring_func="softmax", topk_method="greedy", rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "glm4_moe_lite": _of(
        "Glm4MoeLiteForCausalLM", Row("glm4_moe_lite", keys=_LATENT_KEYS, gguf="deepseek2", scores="SIGMOID"),
        **{key: value for key, value in _V3.items() if key not in ("first_k_dense_replace", "moe_layer_freq")}
        | _TWELVE | _GROUPS | {"routed_scaling_factor": 1.8, "n_shared_experts": 2},
        topk_method="noaux_tc", mlp_layer_types=["dense", "dense", "sparse"],
    ),
    "kimi_k25": _of(
        "DeepseekV3ForCausalLM",
        Row("deepseek_v3", keys=_LATENT_KEYS, gguf="deepseek2", scores="SIGMOID", **_KIMI_NAMES),
        nested=True, **_V3, scoring_func="sigmoid", topk_method="noaux_tc",
    ),
    "deepseek_v32": _of(
        "DeepseekV32ForCausalLM",
        Row("deepseek_v32", keys=_LATENT_KEYS, gguf="deepseek32", scores="SIGMOID"),
        top_k=4, **_LATENT, **_GROUPS, **_INDEXER, first_k_dense_replace=1,
    ),
    "glm_moe_dsa": _of(
        "GlmMoeDsaForCausalLM",
        Row("glm_moe_dsa", keys=_LATENT_KEYS, gguf="glm-dsa", scores="SIGMOID", left_out=_SHARED_INDEXER),
        top_k=4, **_LATENT, **_INDEXER, routed_scaling_factor=2.5, norm_topk_prob=True,
        mlp_layer_types=["dense", "sparse", "sparse"], index_topk_pattern="FSF",
    ),
    "hy_v4": _of(
        "HYV4ForCausalLM",
        Row("hy_v4", keys=_LATENT_KEYS, renamed=_HY_NAMES, gguf="hy_v4", scores="SIGMOID"),
        top_k=4, expert_layout="fused", **_LATENT, **_INDEXER, routed_scaling_factor=2.5, norm_topk_prob=True,
        hc_mult=3, hc_magnitude=1.5, hc_eps=1e-6, swiglu_limit=0.7, mlp_layer_types=["dense", "sparse", "sparse"],
        indexer_types=["full", "full", "shared"], pad_token_id=1,
    ),
    "dots3_note": _of(
        "Dots3NoteForCausalLM",
        Row("dots3_note_text", keys=_LATENT_KEYS, gguf="dots3note", scores="SIGMOID"),
        top_k=4, **_LATENT, **_INDEXER, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5,
        shared_experts_intermediate_size=20, sliding_window=9, layer_types=[FULL, SLIDING, FULL],
        mlp_layer_types=["dense", "sparse", "sparse"], swa_num_attention_heads=3, swa_num_key_value_heads=3,
        swa_q_lora_rank=20, swa_kv_lora_rank=18, swa_head_dim=24, swa_qk_nope_head_dim=16, swa_v_head_dim=10,
        rope_form="rope_scaling", swa_rope_theta=1e3, pad_token_id=0,
    ),
    "axk1": _of(
        "AXK1ForCausalLM", Row("axk1", keys=_LATENT_KEYS),
        top_k=4, **_LATENT, **_GROUPS, first_k_dense_replace=1,
    ),
    "axk2": _of(
        "AXK2ForCausalLM", Row("axk2", keys=_LATENT_KEYS),
        top_k=4, **_LATENT, **_GROUPS, **_INDEXER, gated_norm_rank=7, first_k_dense_replace=1,
    ),
    "mistral_large4": _of(
        "MistralLarge4ForConditionalGeneration",
        Row("mistral_large4_text", keys=_LATENT_KEYS, renamed=_LARGE4_NAMES, outer="mistral_large4",
            prefix=("model.", ""), vision_tensor="vision_encoder.transformer.layers.0.attention_norm.weight",
            means={"ssmax_scaling.b": 0.5}),
        nested=True, top_k=4, num_layers=4, **{key: size for key, size in _LATENT.items() if key != "q_lora_rank"},
        **_INDEXER, n_group=4, topk_group=2, routed_scaling_factor=1.5, first_k_dense_replace=1,
        indexer_types=["full", "full", "full", "shared"], no_rope_layers=[1, 0, 1, 0], kv_source_layers=[0, 1, 0, 1],
        final_logit_softcapping=30.0,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            "attention_factor": 1.0,
        },
    ),
    "mistral4": _of(
        "Mistral4ForCausalLM", Row("mistral4", keys=_LATENT_KEYS, gguf="mistral4"),
        top_k=4, expert_layout="fused", **_LATENT, **_GROUPS, first_k_dense_replace=1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
            "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.6,
        },
    ),
}  # fmt: skip
DENSE: Final = {
    "llama": _of("LlamaForCausalLM", Row("llama", keys=_DENSE, gguf="llama")),
    "mistral": _of("MistralForCausalLM", Row("mistral", keys=_DENSE, gguf="llama"), sliding_window=None),
    "qwen2": _of("Qwen2ForCausalLM", Row("qwen2", keys=_DENSE, gguf="qwen2")),
    "qwen3": _of("Qwen3ForCausalLM", Row("qwen3", keys=_DENSE, gguf="qwen3")),
    "seed_oss": _of(
        "SeedOssForCausalLM", Row("seed_oss", keys=_DENSE, gguf="seed_oss"),
        attention_bias=True, attention_out_bias=False,
    ),
    "hunyuan_v1_dense": _of("HunYuanDenseV1ForCausalLM", Row("hunyuan_v1_dense", keys=_DENSE, gguf="hunyuan-dense")),
    "gemma2": _of(
        "Gemma2ForCausalLM", Row("gemma2", keys=_DENSE), hidden_size=64, sliding_window=9, query_pre_attn_scalar=24,
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=0.5, final_logit_softcapping=30.0,
    ),
    "gemma3": _of(
        "Gemma3ForCausalLM", Row("gemma3_text", keys=_DENSE, gguf="gemma3"), head_dim=24, final_logit_softcapping=30.0,
        **_GEMMA3,
    ),
}  # fmt: skip
EXAMPLES: Final[dict[str, TinyModel]] = {**GROUPED_QUERY, **MULTIMODAL, **RECURRENT, **LATENT, **DENSE}
"""By the name in `models.registry.FAMILIES`, of further models with a suffix."""


def tiny(name: str, **changed: Any) -> TinyFamily:
    """The family's model with other fields or keys of config.json, without groups of experts."""
    model = EXAMPLES[name]
    assert isinstance(model, TinyFamily)
    return model.resized(**changed)
