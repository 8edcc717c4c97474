"""Families described by `Decoder`, by name: grouped-query attention and known feed-forward parts.

References: transformers `models/NAME`. Defaults are those of its configuration classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from twofold.models.decoder import Decoder, TextPart
from twofold.models.keys import Settings

# The router of DeepSeek-V3 and of models after it.
_SIGMOID: Final = {"score": "sigmoid", "bias": True}


def _last_layers(settings: Settings, layer: int) -> bool:
    """Windows of Qwen's dense models: switched on by a key, from a layer on."""
    switched_on = settings.fields.boolean("use_sliding_window", False)
    return switched_on and layer >= settings.integer("max_window_layers")


_GEMMA3: Final = Decoder(
    "Gemma 3, text only (270M, 1B): windows in five of six layers, norms after blocks too, no experts.",
    "gemma3_text",
    defaults={
        "max_position_embeddings": 131_072, "rope_theta": 1e6, "sliding_window": 4096, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256, "hidden_size": 2304, "num_hidden_layers": 26, "vocab_size": 262_208,
    },
    only={
        "hidden_activation": ("gelu_pytorch_tanh",), "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    attention={"qk_norm": True, "zero_centred": True},
    slides=lambda settings, layer: bool((layer + 1) % settings.fields.integer("sliding_window_pattern", 6)),
    dense={"activation": "gelu_tanh", "zero_centred": True, "norm": "pre_feedforward_layernorm"},
    post_norms=(
        ("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm"),
    ),
    scaled_embedding=True,
    local_theta=10_000.0,
    router=None,
)  # fmt: skip

DECODERS: Final = {
    "dots1": Decoder(
        "dots.llm1: Qwen3's attention with windows in the last layers, DeepSeek-V3's router, shared experts.",
        "dots1",
        defaults={"max_position_embeddings": 2048, "sliding_window": 4096, "max_window_layers": 62},
        only={"scoring_func": ("noaux_tc", "sigmoid")},  # two names of one score
        attention={"qk_norm": True},
        slides=lambda settings, layer: (
            settings.optional("sliding_window") is not None and layer >= settings.integer("max_window_layers")
        ),
        router=_SIGMOID,
    ),
    "solar_open": Decoder(
        "Solar Open: GLM-4.5's router and shared experts in every layer, heads rotated whole.",
        "solar_open",
        defaults={
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_shared_experts": 1,
            "head_dim": 128, "num_key_value_heads": 8, "norm_topk_prob": True,
        },
        attention={"o_bias": False},
        router=_SIGMOID,
    ),
    "hy_v3": Decoder(
        "Hunyuan 3 (Hy3): per-head norms of queries and keys, sigmoid router with a scale, shared experts.",
        "hy_v3",
        defaults={
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0,
            "first_k_dense_replace": 1, "num_shared_experts": 1, "routed_scaling_factor": 2.826, "head_dim": 128,
            "num_key_value_heads": 8,
        },
        only={"mlp_bias": (False, None)},
        attention={"qk_norm": True},
        router=_SIGMOID | {"bias_name": "e_score_correction_bias", "renormalise": True},
        renamed=(
            ("*.mlp.router.gate.", "*.mlp.gate."),
            ("*.mlp.expert_bias", "*.mlp.e_score_correction_bias"),
            ("*.mlp.shared_mlp.", "*.mlp.shared_experts."),
        ),
    ),
    "mellum": Decoder(
        "Mellum 2: Qwen3-MoE with windows, and a rotation for each kind of layer.",
        "mellum",
        defaults={
            "max_position_embeddings": 131_072, "sliding_window": 1024, "norm_topk_prob": True, "num_experts": 64,
            "num_experts_per_tok": 8, "moe_intermediate_size": 896, "intermediate_size": 7168, "head_dim": 128,
            "num_key_value_heads": 4,
            "rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}},
        },
        attention={"qk_norm": True},
        left_out=(("multi-token prediction", "mtp.*"),),
    ),
    "qwen3_vl_moe": Decoder(
        "Qwen3-VL with experts (30B-A3B, 235B-A22B), its text: Qwen3-MoE; the vision tower is ignored.",
        "qwen3_vl_moe_text",
        defaults={
            "max_position_embeddings": 128_000, "rope_theta": 5e5, "norm_topk_prob": True, "intermediate_size": 5632,
            "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
        },
        attention={"qk_norm": True},
        router={"renormalise": True},
        experts={"transposed": True},
        text=TextPart(),
    ),
    "glm4v_moe": Decoder(
        "GLM-4.5V and 4.6V, their text: GLM-4.5 without norms of queries and keys; the vision tower is ignored.",
        "glm4v_moe_text",
        defaults={
            "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5, "attention_bias": True, "num_shared_experts": 1,
            "first_k_dense_replace": 1, "norm_topk_prob": True, "num_key_value_heads": 8,
        },
        attention={"o_bias": False},
        router=_SIGMOID,
        rotated_share=0.5,
        text=TextPart(),
    ),
    "exaone_moe": Decoder(
        "K-EXAONE: windows in three of four layers, rotation in those alone, DeepSeek-V3's router, shared experts.",
        "exaone_moe",
        defaults={
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096, "num_experts": 64,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "intermediate_size": 16_384,
            "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        },
        attention={"qk_norm": True, "bias": False, "o_bias": False, "rotated": False},
        windowed={"rotated": True},
        slides=lambda settings, layer: (
            settings.optional("sliding_window") is not None
            and bool((layer + 1) % settings.fields.integer("sliding_window_pattern", 4))
        ),
        router=_SIGMOID,
        renamed=(("*.mlp.e_score_correction_bias", "*.mlp.gate.e_score_correction_bias"),),
        left_out=(("multi-token prediction", "mtp*"),),
    ),
    "flint": Decoder(
        "Flint: windows with rotation and full layers without, sinks, sigmoid router, a shared expert.",
        "flint",
        defaults={
            "max_position_embeddings": 262_144, "sliding_window": 513, "mlp_only_layers": [0, 1],
            "intermediate_size": 6144, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024,
            "num_experts": 256, "num_experts_per_tok": 6, "norm_topk_prob": True, "head_dim": 128,
            "num_key_value_heads": 4,
        },
        attention={"qk_norm": True, "sinks": True, "rotated": False},
        windowed={"rotated": True},
        slides=lambda settings, layer: not (
            layer < 2 or layer % 4 == 1 or layer == settings.fields.integer("num_hidden_layers") - 1
        ),
        router={"score": "sigmoid"},
        shared="mlp.shared_expert",
        renamed=(("*.self_attn.softmax_offset", "*.self_attn.sinks"),),
    ),
    "llama": Decoder(
        "Llama 2 and 3, and dense models published as such: no experts.",
        "llama",
        defaults={"max_position_embeddings": 2048},
        only={"mlp_bias": (False, None)},
        attention={"gguf_pairs_neighbours": True},
        router=None,
    ),
    "mistral": Decoder(
        "Mistral 7B, Nemo, Small: no experts.",
        "mistral",
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
        attention={"gguf_pairs_neighbours": True, "bias": False, "o_bias": False},
        slides=lambda settings, layer: settings.optional("sliding_window") is not None,
        router=None,
    ),
    "qwen2": Decoder(
        "Qwen2 and Qwen2.5: biases of q, k and v, windows in the last layers, no experts.",
        "qwen2",
        defaults={"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28},
        attention={"bias": True, "o_bias": False},
        slides=_last_layers,
        router=None,
    ),
    "qwen3": Decoder(
        "Qwen3: per-head norms of queries and keys, no experts.",
        "qwen3",
        defaults={
            "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128,
        },
        attention={"qk_norm": True},
        slides=_last_layers,
        router=None,
    ),
    "seed_oss": Decoder(
        "Seed-OSS (36B): biases of q, k and v, no experts.",
        "seed_oss",
        defaults={
            "max_position_embeddings": 524_288, "attention_bias": True, "head_dim": 128, "num_key_value_heads": 8,
        },
        only={"attention_out_bias": (False, None), "mlp_bias": (False, None)},
        attention={"o_bias": False},
        dense={"gguf_norm": "post_attention_norm"},
        router=None,
    ),
    "gemma3": _GEMMA3,
    "gemma3_vision": replace(
        _GEMMA3,
        summary="Gemma 3 with images (4B to 27B), its text; the vision tower is ignored.",
        text=TextPart(
            (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", "")),
            tuple(f"{at}{part}.*" for at in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        ),
    ),
}  # fmt: skip
