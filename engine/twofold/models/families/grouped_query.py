"""Families with grouped-query attention and experts, by name.

References: transformers `models/NAME`. Defaults are those of its configuration classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.norms import NO_NORMS, HeadNorms
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.selection import Window
from twofold.blocks.biased_experts import BiasedExperts
from twofold.blocks.block import changed
from twofold.blocks.gqa import Gqa
from twofold.blocks.residual import PostNorms
from twofold.models.config_json import num_layers_of, rotary_share
from twofold.models.decoder import Decoder, MtpLayer
from twofold.models.families import grouped_query_gguf as gguf
from twofold.models.keys import FromConfig, Settings
from twofold.weights.json_file import Fields

SIGMOID: Final = {"score": "sigmoid", "bias": True}
"""The router of DeepSeek-V3 and of models after it."""
# Checkpoints call the experts' matrices w1 (gate), w3 (up) and w2 (down); transformers 5 may write them fused.
_MODULES: Final = ("mlp", "block_sparse_moe")
PROJECTIONS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
HUNYUAN_NORMS: Final = (
    ("*.self_attn.query_layernorm.", "*.self_attn.q_norm."), ("*.self_attn.key_layernorm.", "*.self_attn.k_norm."),
)  # fmt: skip
_GRANITE_MODULE: Final = ("block_sparse_moe",)
_MINIMAX_ONLY: Final = {
    "scoring_func": ("sigmoid",), "use_qk_norm": (True,), "use_routing_bias": (True,), "shared_intermediate_size": (0,),
}  # fmt: skip
_ERNIE_MTP: Final = {
    "model.mtp_linear_proj.0.": "eh_proj.", "model.mtp_emb_norm.0.": "enorm.", "model.mtp_hidden_norm.0.": "hnorm.",
    "model.mtp_block.0.": "",
}  # fmt: skip


def has_window(settings: Settings, layer: int) -> bool:
    """Whether all layers have a window, because the file states its size."""
    return bool(settings.optional("sliding_window"))


def _switched_on(settings: Settings, layer: int) -> bool:
    return settings.fields.boolean("use_sliding_window", False) and has_window(settings, layer)


def _every_other(settings: Settings, layer: int) -> bool:
    """Windows of Qwen2-MoE without a list: every other one of the first layers."""
    return (
        settings.fields.boolean("use_sliding_window", False)
        and layer < settings.integer("max_window_layers")
        and layer % 2 == 0
    )


def _listed_if_switched_on(fields: Fields) -> dict[str, Any]:
    """Qwen2-MoE's list of windows does not count where they are switched off."""
    return {} if fields.boolean("use_sliding_window", False) else {"layer_types": None}


def _ernie_layers(fields: Fields) -> dict[str, Any]:
    """ERNIE's layers with experts, which it states as an interval."""
    fields.number("moe_norm_min", 1e-12, maximum=1e-6)  # far below any sum of probabilities it bounds
    if fields.boolean("values_of_gguf", False):
        return {}
    first, last = (fields.integer(f"moe_layer_{end}_index", minimum=-1) for end in ("start", "end"))
    step, layers = fields.integer("moe_layer_interval"), range(num_layers_of(fields))
    last = layers[-1] if last == -1 else last
    sparse = {n for n in layers if first <= n <= last and (n + 1) % step == 0}
    return {"mlp_layer_types": ["sparse" if n in sparse else "dense" for n in layers]}


def _minimax_share(fields: Fields) -> dict[str, Any]:
    """MiniMax-M2's number of rotated elements as a share."""
    heads = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim", minimum=1) or fields.integer("hidden_size") // heads
    rotated = fields.integer("rotary_dim", head_dim, maximum=head_dim)
    return {"partial_rotary_factor": rotary_share(rotated, head_dim)} | fields.data


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
        gate=Gate("g_proj", "element" if per_element else "head", "softplus"),
    )


def _mimo_attention(settings: Settings, layer: int, attention: Gqa) -> Gqa:
    """MiMo's heads: layers with a window have twice the key heads."""
    doubled = 2 if isinstance(attention.select, Window) else 1
    values = {
        "v_head_dim": settings.fields.integer("v_head_dim"),
        "value_scale": settings.fields.optional_number("attention_value_scale", above=True) or 1.0,
    }
    return changed(attention, {"num_kv_heads": doubled * attention.num_kv_heads, "project": values})


def _mimo_window(fields: Fields) -> dict[str, Any]:
    """MiMo's published window, which does not count the query itself."""
    size = fields.optional_integer("sliding_window_size")
    return {} if size is None else {"sliding_window": size + 1}


_GRANITE: Final = Decoder(
    "Granite with experts (1B-A400M, 3B-A800M), with and without shared ones: multipliers, softmax over the chosen.",
    "granitemoe",
    multipliers=True,
    attention={"project": {"gguf_pairs_neighbours": True}},
    router={
        "score": "softmax_of_chosen", "renormalise": False, "modules": _GRANITE_MODULE,
        "gates": ("router", "router.layer"),
    },
    shared={"module": "shared_mlp", "fused": ("input_linear", "output_linear")},
    inner="intermediate_size",
    experts={
        "modules": _GRANITE_MODULE,
        "fused": (("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight")),
    },
    gguf=gguf.granite,
    gguf_score="softmax",
)  # fmt: skip

GROUPED_QUERY: Final = {
    "qwen3_moe": Decoder(
        "Qwen3-MoE: grouped-query attention with per-head q/k norms, softmax-then-top-k routing, "
        "optional dense layers.",
        "qwen3_moe",
        attention={"norms": HeadNorms()},
        slides=_switched_on,
        # Published models have no MTP layer; trained ones are named as DeepSeek-V3's.
        mtp=MtpLayer(),
        gguf=gguf.qwen3,
    ),
    "mixtral": Decoder(
        "Mixtral: grouped-query attention, every layer a mixture, the k routing weights always divided by their sum.",
        "mixtral",
        attention={"project": {"gguf_pairs_neighbours": True}},
        slides=has_window,
        router={"modules": _MODULES},
        inner="intermediate_size",
        experts={"modules": _MODULES, "projections": PROJECTIONS},
        gguf=gguf.mixtral,
    ),
    "qwen2_moe": Decoder(
        "Qwen2-MoE and Qwen1.5-MoE: biases of q, k and v, softmax-then-top-k routing, gated shared experts.",
        "qwen2_moe",
        restated=_listed_if_switched_on,
        attention={"project": {"bias": FromConfig("qkv_bias", True)}, "o_bias": False},
        slides=_every_other,
        shared={"module": "mlp.shared_expert", "gated": True},
        gguf=gguf.qwen2,
    ),
    "olmoe": Decoder(
        "OLMoE: norms of queries and keys over all heads together, every layer a mixture, softmax-then-top-k routing.",
        "olmoe",
        only={"clip_qkv": (None,)},
        attention={"norms": HeadNorms("flat")},
        inner="intermediate_size",
        gguf=gguf.olmoe,
    ),
    "glm4_moe": Decoder(
        "GLM-4.5, 4.6, 4.7 and Air: grouped-query attention of which a share of each head is rotated, "
        "DeepSeek-V3's router.",
        "glm4_moe",
        attention={"norms": FromConfig("use_qk_norm", False, (NO_NORMS, HeadNorms())), "o_bias": False},
        rotated_share=0.5,
        dense={"gguf_norm": "post_attention_norm"},
        router=SIGMOID | {"gguf_norm": "post_attention_norm"},
        mtp=MtpLayer(),
        gguf=gguf.glm4,
    ),
    "dots1": Decoder(
        "dots.llm1: Qwen3's attention with windows in the last layers, DeepSeek-V3's router, shared experts.",
        "dots1",
        only={"scoring_func": ("noaux_tc", "sigmoid")},  # two names of one score
        attention={"norms": HeadNorms()},
        slides=lambda settings, layer: (
            has_window(settings, layer) and layer >= settings.integer("max_window_layers")
        ),
        router=SIGMOID,
    ),
    "solar_open": Decoder(
        "Solar Open: GLM-4.5's router and shared experts in every layer, heads rotated whole.",
        "solar_open",
        attention={"o_bias": False},
        rotated_share=1.0,
        router=SIGMOID,
    ),
    "hy_v3": Decoder(
        "Hunyuan 3 (Hy3): per-head norms of queries and keys, sigmoid router with a scale, shared experts.",
        "hy_v3",
        only={"mlp_bias": (False, None)},
        attention={"norms": HeadNorms()},
        router=SIGMOID | {"bias_name": "e_score_correction_bias", "renormalise": True},
        renamed=(
            ("*.mlp.router.gate.", "*.mlp.gate."),
            ("*.mlp.expert_bias", "*.mlp.e_score_correction_bias"),
            ("*.mlp.shared_mlp.", "*.mlp.shared_experts."),
        ),
    ),
    "mellum": Decoder(
        "Mellum 2: Qwen3-MoE with windows, and a rotation for each kind of layer.",
        "mellum",
        attention={"norms": HeadNorms()},
        rotated_share=1.0,
        left_out=(("multi-token prediction", "mtp.*"),),
        gguf=gguf.renormalised,
        gguf_period=4,
    ),
    "exaone_moe": Decoder(
        "K-EXAONE: windows in three of four layers, rotation in those alone, DeepSeek-V3's router, shared experts.",
        "exaone_moe",
        attention={"project": {"bias": False}, "norms": HeadNorms(), "rotation": None, "o_bias": False},
        windowed={"rotation": Rotation()},
        slides=lambda settings, layer: (
            has_window(settings, layer)
            and bool((layer + 1) % settings.fields.integer("sliding_window_pattern", 4))
        ),
        router=SIGMOID,
        renamed=(("*.mlp.e_score_correction_bias", "*.mlp.gate.e_score_correction_bias"),),
        left_out=(("multi-token prediction", "mtp*"),),
    ),
    "flint": Decoder(
        "Flint: windows with rotation and full layers without, sinks, sigmoid router, a shared expert.",
        "flint",
        attention={"norms": HeadNorms(), "rotation": None, "scores": {"sinks": True}},
        windowed={"rotation": Rotation()},
        slides=lambda settings, layer: not (
            layer < 2 or layer % 4 == 1 or layer == settings.fields.integer("num_hidden_layers") - 1
        ),
        router={"score": "sigmoid"},
        shared={"module": "mlp.shared_expert"},
        renamed=(("*.self_attn.softmax_offset", "*.self_attn.sinks"),),
    ),
    "hunyuan_v1_moe": Decoder(
        "Hunyuan-A13B: softmax router, one shared expert, norms of queries and keys after the rotation.",
        "hunyuan_v1_moe",
        attention={"norms": HeadNorms("late")},
        stretched=True,
        router={"renormalise": True, "gates": ("gate.wg",)},
        shared={"module": "mlp.shared_mlp"},
        inner="intermediate_size",
        renamed=HUNYUAN_NORMS,
    ),
    "mimo_v2_flash": Decoder(
        "MiMo-V2-Flash: windows with sinks and twice the key heads, values shorter than keys and scaled.",
        "mimo_v2_flash",
        restated=_mimo_window,
        attention={"o_bias": False},
        windowed={"scores": {"sinks": True}},
        slides=lambda settings, layer: layer > 0 and bool((layer + 1) % 6),
        of_layer=_mimo_attention,
        rotated_share=0.334,
        router=SIGMOID,
        renamed=(("*.self_attn.attention_sink_bias", "*.self_attn.sinks"),),
        left_out=(("multi-token prediction", "model.mtp.*"),),
        gguf=gguf.mimo,
    ),
    "afmoe": Decoder(
        "AFMoE (Trinity): gated attention, windows with rotation and full layers without, norms after blocks too.",
        "afmoe",
        scaled_embedding=FromConfig("mup_enabled", False),
        attention={"norms": HeadNorms(), "rotation": None, "gate": Gate("gate_proj")},
        windowed={"rotation": Rotation()},
        slides=lambda settings, layer: bool((layer + 1) % settings.fields.integer("global_attn_every_n_layers", 4)),
        residual=PostNorms(
            ("post_attention_layernorm", "post_attention_norm"), ("post_mlp_layernorm", "post_ffw_norm"),
        ),
        dense={"norm": "pre_mlp_layernorm"},
        router=SIGMOID | {
            "bias_name": "e_score_correction_bias", "renormalise": True, "norm": "pre_mlp_layernorm",
        },
        renamed=(
            ("*.mlp.router.gate.", "*.mlp.gate."), ("*.mlp.expert_bias", "*.mlp.e_score_correction_bias"),
        ),
        gguf=lambda metadata: {"mup_enabled": True},  # as in llama.cpp
    ),
    "laguna": Decoder(
        "Laguna: gates by head or element, query heads by layer, windows, sigmoid router with capped logits.",
        "laguna",
        only={"moe_apply_router_weight_on_input": (False, None)},
        attention={"norms": HeadNorms()},
        of_layer=_heads_by_layer,
        rotated_share=1.0,
        router=SIGMOID | {"renormalise": True},
        renamed=(
            ("*.mlp.experts.e_score_correction_bias", "*.mlp.gate.e_score_correction_bias"),
            ("*.mlp.shared_expert.", "*.mlp.shared_experts."),
        ),
        gguf=gguf.laguna,
        gguf_period=4,
        gguf_full_first=True,
    ),
    "flex_olmo": Decoder(
        "FlexOlmo: OLMoE's heads and router; norms after blocks instead of before them.",
        "flex_olmo",
        attention={"project": {"normed": False}, "norms": HeadNorms("flat")},
        residual=PostNorms(("post_attention_layernorm", ""), ("post_feedforward_layernorm", "")),
        router={"norm": None},
        inner="intermediate_size",
    ),
    "minimax_m2": Decoder(
        "MiniMax-M2: norms of queries and keys over all heads together, partial rotation, sigmoid scores with a bias.",
        "minimax_m2",
        only=_MINIMAX_ONLY,
        restated=_minimax_share,
        attention={"norms": HeadNorms("flat")},
        rotated_share=1.0,
        router=SIGMOID | {"renormalise": True, "bias_name": "e_score_correction_bias", "modules": _MODULES},
        inner="intermediate_size",
        experts={"modules": _MODULES, "projections": PROJECTIONS},
        # No published checkpoint has the weights of its MTP layers, so their layout is not known.
    ),
    "ernie4_5_moe": Decoder(
        "ERNIE-4.5 with experts: rotation of neighbouring pairs, softmax scores with a bias for "
        "choosing, shared experts.",
        "ernie4_5_moe",
        only={"use_bias": (False,)},
        restated=_ernie_layers,
        attention={"rotation": Rotation(neighbours=True)},
        router={"renormalise": True, "bias": True, "bias_name": "moe_statics.e_score_correction_bias"},
        mtp=MtpLayer(
            dense=True, own_norm=False, unannounced=True, renamed=_ERNIE_MTP, pattern="model.mtp_*"
        ),
        renamed=(("*.mlp.gate.moe_statics.", "*.mlp.moe_statics."),),
    ),
    "granitemoe": _GRANITE,
    "granitemoe_swa": replace(
        _GRANITE,
        summary="Granite with experts and windows: sinks, windows in three of four layers, a rotation for each "
                "layer or none.",
        model_type="granitemoe_swa",
        attention={**_GRANITE.attention, "scores": {"sinks": True}},
        slides=lambda settings, layer: layer % 4 != 0,
        thetas="layer_rope_theta",
        gguf=gguf.granite_swa,
        gguf_period=4,
        gguf_full_first=True,
    ),
    "gpt_oss": Decoder(
        "gpt-oss: attention with sinks and biases, a window in every other layer; experts with biases "
        "and a clamped SwiGLU.",
        "gpt_oss",
        only={"swiglu_alpha": (1.702, None)},
        attention={"scores": {"sinks": True}},
        slides=lambda settings, layer: layer % 2 == 0,
        router={
            "score": "softmax_of_chosen", "gates": ("router",), "gate_bias": True, "gguf_norm": "post_attention_norm",
        },
        inner="intermediate_size",
        kind_of_experts=BiasedExperts,
        experts={"activation": "swiglu_oai", "limit": FromConfig("swiglu_limit", 7.0)},
        gguf=gguf.gpt_oss,
        gguf_period=2,
    ),
}  # fmt: skip
