"""Families described by `Decoder`, by name: grouped-query attention and known feed-forward parts.

References: transformers `models/NAME`. Defaults are those of its configuration classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.gqa import Gqa
from twofold.models.config_json import num_layers_of
from twofold.models.decoder import Decoder, TextPart
from twofold.models.gguf_config import GgufMetadata
from twofold.models.keys import Settings
from twofold.weights.json_file import Fields

# The router of DeepSeek-V3 and of models after it.
_SIGMOID: Final = {"score": "sigmoid", "bias": True}


def _last_layers(settings: Settings, layer: int) -> bool:
    """Windows of Qwen's dense models: switched on by a key, from a layer on."""
    switched_on = settings.fields.boolean("use_sliding_window", False)
    return switched_on and layer >= settings.integer("max_window_layers")


def _gemma3_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Gemma 3's scale of scores, which files do not have (as in llama.cpp: 27B, of 62 layers, has its own), and its
    cap."""
    fields = metadata.fields
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, metadata.hidden_size // heads))
    return {
        "query_pre_attn_scalar": metadata.hidden_size // heads if metadata.num_layers == 62 else head_dim,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping", above=True),
    }


_GEMMA3: Final = Decoder(
    "Gemma 3, text only (270M, 1B): windows in five of six layers, norms after blocks too, no experts.",
    "gemma3_text",
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
    gguf=_gemma3_gguf,
)  # fmt: skip

_HUNYUAN: Final = Decoder(
    "Hunyuan V1 dense (0.5B to 7B): per-head norms of queries and keys after the rotation, no experts.",
    "hunyuan_v1_dense",
    attention={"qk_norm": True, "late_norms": True},
    router=None,
    renamed=(
        ("*.self_attn.query_layernorm.", "*.self_attn.q_norm."), ("*.self_attn.key_layernorm.", "*.self_attn.k_norm."),
    ),
)  # fmt: skip


def _heads_by_layer(settings: Settings, layer: int, attention: Gqa) -> Gqa:
    """Laguna's number of query heads, and the granularity of its gate."""
    fields, heads = settings.fields, settings.fields.integers("num_attention_heads_per_layer", minimum=1)
    num_layers = num_layers_of(fields)
    if heads and len(heads) != num_layers:
        raise fields.error(
            "num_attention_heads_per_layer", list(heads), f"one number for each of {num_layers} layers"
        )
    fields.only("gating", True, "per-head", "per-element")
    per_element = fields.data.get("gating") == "per-element"
    return replace(
        attention,
        num_heads=heads[layer] if heads else attention.num_heads,
        gate_of="element" if per_element else "head",
    )


def _mimo_attention(settings: Settings, layer: int, attention: Gqa) -> Gqa:
    """MiMo's heads: layers with a window have twice the key heads."""
    doubled = 1 if attention.sliding_window is None else 2
    return replace(
        attention,
        num_kv_heads=doubled * attention.num_kv_heads,
        v_head_dim=settings.fields.integer("v_head_dim"),
        value_scale=settings.fields.optional_number("attention_value_scale", above=True) or 1.0,
    )


def _mimo_window(fields: Fields) -> dict[str, Any]:
    """MiMo's published window, which does not count the query itself."""
    size = fields.optional_integer("sliding_window_size")
    return {} if size is None else {"sliding_window": size + 1}


def _mimo_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """MiMo's heads and scale of values. Raises ModelLoadError for other numbers of heads than the family's."""
    fields = metadata.fields
    slides = metadata.slides(0)
    heads = metadata.of_layers("attention.head_count_kv", minimum=1)[: metadata.num_layers]
    single = {heads[n] // (1 + slide) for n, slide in enumerate(slides)}
    if len(single) != 1 or any(heads[n] % 2 for n, slide in enumerate(slides) if slide):
        raise fields.error("attention.head_count_kv", heads[:8], "twice as many in layers with a window")
    return {
        "num_key_value_heads": single.pop(),
        "v_head_dim": fields.integer("attention.value_length"),
        "attention_value_scale": fields.number("attention.value_scale", 1.0, above=True),
        **_renormalised(metadata),
    }


def _laguna_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Laguna's query heads by layer, and whether its gate is by head or by element."""
    heads = metadata.of_layers("attention.head_count", minimum=1)[: metadata.num_layers]
    gate = metadata.file.tensors.get("blk.0.attn_gate.weight")
    by_head = gate is None or gate.shape[0] == heads[0]
    return {"num_attention_heads_per_layer": heads, "gating": "per-head" if by_head else "per-element"}


def _renormalised(metadata: GgufMetadata) -> dict[str, Any]:
    """Routing weights are normalised unless the file says otherwise; most files do not say it."""
    return {"norm_topk_prob": metadata.fields.boolean("expert_weights_norm", True)}


DECODERS: Final = {
    "dots1": Decoder(
        "dots.llm1: Qwen3's attention with windows in the last layers, DeepSeek-V3's router, shared experts.",
        "dots1",
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
        attention={"o_bias": False},
        router=_SIGMOID,
    ),
    "hy_v3": Decoder(
        "Hunyuan 3 (Hy3): per-head norms of queries and keys, sigmoid router with a scale, shared experts.",
        "hy_v3",
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
        attention={"qk_norm": True},
        left_out=(("multi-token prediction", "mtp.*"),),
        gguf=_renormalised,
        gguf_period=4,
    ),
    "qwen3_vl_moe": Decoder(
        "Qwen3-VL with experts (30B-A3B, 235B-A22B), its text: Qwen3-MoE; the vision tower is ignored.",
        "qwen3_vl_moe_text",
        attention={"qk_norm": True},
        router={"renormalise": True},
        experts={"transposed": True},
        text=TextPart(),
    ),
    "glm4v_moe": Decoder(
        "GLM-4.5V and 4.6V, their text: GLM-4.5 without norms of queries and keys; the vision tower is ignored.",
        "glm4v_moe_text",
        attention={"o_bias": False},
        router=_SIGMOID,
        rotated_share=0.5,
        text=TextPart(),
    ),
    "exaone_moe": Decoder(
        "K-EXAONE: windows in three of four layers, rotation in those alone, DeepSeek-V3's router, shared experts.",
        "exaone_moe",
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
        attention={"qk_norm": True, "sinks": True, "rotated": False},
        windowed={"rotated": True},
        slides=lambda settings, layer: not (
            layer < 2 or layer % 4 == 1 or layer == settings.fields.integer("num_hidden_layers") - 1
        ),
        router={"score": "sigmoid"},
        shared="mlp.shared_expert",
        renamed=(("*.self_attn.softmax_offset", "*.self_attn.sinks"),),
    ),
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        summary="Hunyuan-A13B: softmax router, one shared expert, norms of queries and keys after the rotation.",
        model_type="hunyuan_v1_moe",
        router={"renormalise": True, "gates": ("gate.wg",)},
        inner="intermediate_size",
        shared="mlp.shared_mlp",
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "mimo_v2_flash": Decoder(
        "MiMo-V2-Flash: windows with sinks and twice the key heads, values shorter than keys and scaled.",
        "mimo_v2_flash",
        restated=_mimo_window,
        attention={"o_bias": False},
        windowed={"sinks": True},
        slides=lambda settings, layer: layer > 0 and bool((layer + 1) % 6),
        of_layer=_mimo_attention,
        gguf=_mimo_gguf,
        router=_SIGMOID,
        rotated_share=0.334,
        renamed=(("*.self_attn.attention_sink_bias", "*.self_attn.sinks"),),
        left_out=(("multi-token prediction", "model.mtp.*"),),
    ),
    "afmoe": Decoder(
        "AFMoE (Trinity): gated attention, windows with rotation and full layers without, norms after blocks too.",
        "afmoe",
        attention={"qk_norm": True, "gate": "gate_proj", "rotated": False},
        windowed={"rotated": True},
        slides=lambda settings, layer: bool((layer + 1) % settings.fields.integer("global_attn_every_n_layers", 4)),
        router=_SIGMOID | {
            "bias_name": "e_score_correction_bias", "renormalise": True, "norm": "pre_mlp_layernorm",
        },
        dense={"norm": "pre_mlp_layernorm"},
        post_norms=(
            ("post_attention_layernorm", "post_attention_norm"), ("post_mlp_layernorm", "post_ffw_norm"),
        ),
        scaled_embedding="mup_enabled",
        gguf=lambda metadata: {"mup_enabled": True},  # as in llama.cpp
        renamed=(
            ("*.mlp.router.gate.", "*.mlp.gate."), ("*.mlp.expert_bias", "*.mlp.e_score_correction_bias"),
        ),
    ),
    "laguna": Decoder(
        "Laguna: gates by head or element, query heads by layer, windows, sigmoid router with capped logits.",
        "laguna",
        only={"moe_apply_router_weight_on_input": (False, None)},
        attention={"qk_norm": True, "gate": "g_proj", "softplus": True},
        of_layer=_heads_by_layer,
        gguf=_laguna_gguf,
        gguf_period=4,
        gguf_full_first=True,
        router=_SIGMOID | {"renormalise": True},
        renamed=(
            ("*.mlp.experts.e_score_correction_bias", "*.mlp.gate.e_score_correction_bias"),
            ("*.mlp.shared_expert.", "*.mlp.shared_experts."),
        ),
    ),
    "flex_olmo": Decoder(
        "FlexOlmo: OLMoE's heads and router; norms after blocks instead of before them.",
        "flex_olmo",
        attention={"qk_norm": True, "flat_norms": True, "normed": False},
        router={"norm": None},
        post_norms=(("post_attention_layernorm", ""), ("post_feedforward_layernorm", "")),
        inner="intermediate_size",
    ),
    "ernie4_5_vl_moe": Decoder(
        "ERNIE-4.5-VL (28B-A3B), its text: ERNIE-4.5 with a gate of text tokens; the experts of images are ignored.",
        "ernie4_5_vl_moe_text",
        only={"use_bias": (False, None)},
        attention={"neighbours": True},
        renamed=(("*.mlp.text_moe.", "*.mlp."), ("*.mlp.gate.moe_statics.", "*.mlp.moe_statics.")),
        router={
            "renormalise": True, "bias": True, "bias_name": "moe_statics.e_score_correction_bias", "of_images": True,
        },
        text=TextPart(
            (("model.language_model.", "model."),),
            (
                "*.mlp.gate.weight_1", "*.mlp.vision_moe.*",
                *(f"{at}{part}.*" for at in ("", "model.") for part in ("vision_model", "vision_tower")),
                *(f"{at}resampler_model.*" for at in ("", "model.")),
            ),
            experts_of_images=True,
        ),
    ),
    "qwen3_omni_moe": Decoder(
        "Qwen3-Omni, the text part of its thinker: Qwen3-MoE; audio, vision, talker and codec are ignored.",
        "qwen3_omni_moe_text",
        attention={"qk_norm": True},
        router={"renormalise": True},
        text=TextPart(
            (
                ("thinker.lm_head.", "lm_head."), ("thinker.model.language_model.", "model."),
                ("thinker.model.", "model."), ("model.language_model.", "model."),
            ),
            (
                "talker.*", "code2wav.*",
                *(f"{at}{part}.*" for at in ("thinker.", "model.", "") for part in ("audio_tower", "visual")),
            ),
            "thinker_config",
        ),
    ),
    "llama": Decoder(
        "Llama 2 and 3, and dense models published as such: no experts.",
        "llama",
        only={"mlp_bias": (False, None)},
        attention={"gguf_pairs_neighbours": True},
        router=None,
    ),
    "mistral": Decoder(
        "Mistral 7B, Nemo, Small: no experts.",
        "mistral",
        attention={"gguf_pairs_neighbours": True, "bias": False, "o_bias": False},
        slides=lambda settings, layer: settings.optional("sliding_window") is not None,
        router=None,
    ),
    "qwen2": Decoder(
        "Qwen2 and Qwen2.5: biases of q, k and v, windows in the last layers, no experts.",
        "qwen2",
        attention={"bias": True, "o_bias": False},
        slides=_last_layers,
        router=None,
    ),
    "qwen3": Decoder(
        "Qwen3: per-head norms of queries and keys, no experts.",
        "qwen3",
        attention={"qk_norm": True},
        slides=_last_layers,
        router=None,
    ),
    "seed_oss": Decoder(
        "Seed-OSS (36B): biases of q, k and v, no experts.",
        "seed_oss",
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
