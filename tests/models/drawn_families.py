"""Random configurations of every family: each key of its tiny model gets another value."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tests.tiny_models.family import TinyFamily
from tests.tiny_models.table import EXAMPLES, FULL, LLAMA3, SLIDING, YARN, by_kind
from tests.tiny_models.writing import TinyModel

SCOUT: Final = LLAMA3 | {"high_freq_factor": 1.0}
LINEAR: Final = {"rope_type": "linear", "factor": 2.0}
NO_BIASES: Final = (
    "mistral", "qwen2", "deepseek_v32", "glm_moe_dsa", "dots3_note", "axk1", "mistral4", "ernie4_5_moe",
    "ernie4_5_vl_moe", "minimax_m2", "minimax_m3", "lfm2_moe",
)  # fmt: skip
"""Families to which `attention_bias` means nothing, or whose GGUF files alone could not say it."""
ONE_LAYOUT: Final = ("ernie4_5_vl_moe", "gpt_oss", "llama4", "gemma4", "gemma4-small")
"""Families that are published in one layout of experts."""


def _sizes(r: random.Random) -> dict[str, Any]:
    """Random sizes common to all families."""
    kv_heads, num_experts = r.randint(1, 3), r.randint(2, 11)
    return {
        "hidden_size": r.randint(17, 60), "num_layers": r.randint(2, 4), "num_kv_heads": kv_heads,
        "num_heads": kv_heads * r.randint(1, 3), "head_dim": 2 * r.randint(2, 11), "vocab_size": r.randint(320, 350),
        "intermediate_size": r.randint(9, 70), "moe_intermediate_size": r.randint(5, 40), "num_experts": num_experts,
        "top_k": r.randint(1, min(6, num_experts)), "norm_topk_prob": r.random() < 0.5,
        "tie_word_embeddings": r.random() < 0.3, "rope_theta": r.choice((10_000.0, 1_000_000.0)),
        "rope_scaling": r.choice((None, None, YARN, LINEAR)),
        "rope_form": r.choice(("rope_parameters", "rope_scaling")),
        "num_shards": r.choice((1, 3)), "expert_layout": r.choice(("separate", "fused")), "seed": r.randrange(1000),
    }  # fmt: skip


def _groups(r: random.Random) -> dict[str, Any]:
    groups, of_group = r.choice((1, 1, 2, 3, 4)), r.randint(2, 5)
    best = r.randint(1, groups)
    return {
        "num_experts": groups * of_group, "n_group": groups, "topk_group": best,
        "top_k": r.randint(1, min(6, best * of_group)),
    }  # fmt: skip


def drawn(name: str, r: random.Random) -> TinyModel:
    """A random configuration of the family."""
    base, sizes = EXAMPLES[name], _sizes(r)
    if not isinstance(base, TinyFamily):
        windows = (
            {"sliding_window": r.choice((None, 9))}
            if name == "mixtral"
            else {"mlp_only_layers": r.choice(((), (0,), (1,)))}
        )
        return replace(base, **sizes | windows)
    settings = base.settings
    sizes |= {"attention_bias": r.random() < 0.5 and name not in NO_BIASES}
    if "n_group" in settings:
        sizes |= _groups(r)
    if "norm_topk_prob" not in settings or name in ("axk1", "deepseek_v2"):
        del sizes["norm_topk_prob"]
    has_vision = base.nested and base.row.has_small_vision
    if has_vision or "rope_parameters" in settings:
        sizes |= {"rope_scaling": None, "rope_theta": 1e4, "head_dim": 8 * r.randint(1, 4)}
    if has_vision:
        sizes["head_dim"] = base.head_dim  # mrope_section fits this one
        if sizes["moe_intermediate_size"] * 2 == sizes["hidden_size"]:
            sizes["hidden_size"] += 1  # the orientation of fused experts could not be determined
    elif base.row.outer:
        sizes["nested"] = r.random() < 0.5
    if "kv_lora_rank" in settings:
        sizes["num_kv_heads"] = sizes["num_heads"]
    if base.row.model_type in (
        "gemma2",
        "gemma3_text",
        "llama",
        "aria_text",
    ):  # transformers refuses other sizes
        sizes["hidden_size"] = sizes["num_heads"] * r.randint(3, 9)
    if base.row.model_type == "gemma3_text":
        sizes["tie_word_embeddings"] = base.tie_word_embeddings
    if base.expert_layout == "fused" or name in ONE_LAYOUT:
        sizes["expert_layout"] = base.expert_layout
    if base.has_mtp:
        sizes["has_mtp"] = r.random() < 0.3
    if name in _SIZES:
        sizes |= _SIZES[name](r, sizes)
    layers = sizes["num_layers"]
    sparse = r.randrange(layers)
    choices: dict[str, Any] = {
        "n_shared_experts": r.randint(1, 3), "num_shared_experts": r.randint(1, 3),
        "routed_scaling_factor": r.choice((1.0, 1.7, 2.5)), "router_scaling_factor": r.choice((1.0, 1.7)),
        "first_k_dense_replace": r.randint(0, 1) if name != "solar_open" else 0,
        "shared_expert_intermediate_size": r.randint(5, 70), "sliding_window": r.choice((3, 9, 20)),
        "max_window_layers": r.randint(0, 3), "sliding_window_pattern": r.choice((2, 3)),
        "mlp_only_layers": r.choice(([0], [1])), "partial_rotary_factor": r.choice((0.25, 0.25, 0.5, 1.0)),
        "index_topk_pattern": "F" + "".join(r.choice("FS") for _ in range(layers - 1)),
        "layer_rope_theta": [r.choice((0, 1e4, 5e5)) for _ in range(layers)],
        "layer_types": [r.choice((SLIDING, FULL)) for _ in range(layers)],
        "mlp_layer_types": ["sparse" if n == sparse else r.choice(("dense", "sparse")) for n in range(layers)],
    }  # fmt: skip
    if "kv_lora_rank" in settings:  # dense layers come first
        choices["mlp_layer_types"].sort()
    changed = {key: choices[key] for key in settings if key in choices and key not in sizes}
    model = base.changed(**sizes, **changed)
    return model.changed(**_FURTHER[name](r, model)) if name in _FURTHER else model


Sizes = Callable[[random.Random, dict[str, Any]], dict[str, Any]]


def _full_heads(r: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Heads fill the hidden size. A wide one with a tied head has logits beyond 100, where float32 rounds by 1e-4."""
    head_dim = 2 * r.randint(2, 4)
    return {"head_dim": head_dim, "hidden_size": sizes["num_heads"] * head_dim}


def _own_head_dim(r: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_size": sizes["num_heads"] * sizes["head_dim"]}


_YARN_OR_NONE: Sizes = lambda r, sizes: {  # noqa: E731
    "q_lora_rank": r.choice((None, r.randint(5, 30))), "kv_lora_rank": r.randint(5, 40),
    "qk_nope_head_dim": r.randint(3, 20), "qk_rope_head_dim": 2 * r.randint(1, 6), "v_head_dim": r.randint(3, 20),
    "has_mtp": r.random() < 0.3, "rope_scaling": r.choice((None, YARN | {
        "mscale": r.choice((0.7, 1.0)), "mscale_all_dim": r.choice((0.4, 1.0)),
    })),
}  # fmt: skip
_NO_SCALING: Sizes = lambda r, sizes: {"rope_scaling": None, "rope_form": "rope_scaling"}  # noqa: E731
_DELTA: Sizes = lambda r, sizes: {"num_layers": r.randint(2, 5), "head_dim": 8 * r.randint(1, 4)}  # noqa: E731
_SIZES: Final[dict[str, Sizes]] = {
    "olmoe": _full_heads,
    "dots3_note": _NO_SCALING,
    "granitemoe_swa": _own_head_dim,
    "ernie4_5_vl_moe": _own_head_dim,
    "mimo_v2_flash": lambda r, sizes: {
        "num_heads": 2 * sizes["num_kv_heads"]
    },  # windows have twice as many KV heads
    "hunyuan_v1_moe": lambda r, sizes: {"moe_intermediate_size": sizes["intermediate_size"]},
    "flex_olmo": lambda r, sizes: {"moe_intermediate_size": sizes["intermediate_size"]},
    "glm4_moe": lambda r, sizes: {"head_dim": 8 * r.randint(1, 4), "has_mtp": r.random() < 0.3},
    "ernie4_5_moe": lambda r, sizes: {"has_mtp": r.random() < 0.3},
    "minimax_m2": lambda r, sizes: {"head_dim": 2 * r.randint(1, 6) + 2 * r.randint(0, 4)},
    "llama4": lambda r, sizes: {"top_k": 1, "rope_scaling": r.choice((None, None, LLAMA3, YARN))},
    # Without any rotation, it is YaRN.
    "gpt_oss": lambda r, sizes: {
        "rope_form": "rope_parameters",
        "rope_scaling": r.choice((None, YARN | {"truncate": r.random() < 0.3}, LINEAR)),
    },
    "gemma4-small": lambda r, sizes: {"num_layers": 5},
    "gemma4": lambda r, sizes: {"head_dim": 2 * r.randint(2, 11)},
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "kimi_k25"), _YARN_OR_NONE),
    "aria": lambda r, sizes: {"moe_intermediate_size": sizes["intermediate_size"]},
    "deepseek_ocr2": _own_head_dim,
    "deepseek_v2": lambda r, sizes: {"n_group": 1, "topk_group": 1},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5", "qwen4_exp"), _DELTA),
}


def _delta(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    # Fewer than 5 values of a head: their norm magnifies what either side rounds beyond the comparison.
    k_heads, layers = r.randint(1, 3), range(model.num_layers)
    full = r.sample(layers, r.randint(1, 2))
    own = {
        "linear_num_key_heads": k_heads, "linear_num_value_heads": k_heads * r.randint(1, 3),
        "linear_key_head_dim": r.randint(1, 40), "linear_value_head_dim": r.randint(5, 40),
        "linear_conv_kernel_dim": r.choice((2, 4, 4, 4, 5)),
        "layer_types": [FULL if n in full else "linear_attention" for n in layers],
        "shared_expert_intermediate_size": r.randint(9, 70),
    }  # fmt: skip
    return (
        own | {"mtp_num_hidden_layers": int(model.has_mtp)}
        if "mtp_num_hidden_layers" in model.settings
        else own
    )


def _gemma4(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    last, heads, wide = model.num_layers - 1, model.num_heads, r.choice((0, r.randint(1, 20)))
    shared = (
        r.choice((0, 1, 2, 3)) if wide and model.num_layers == 5 else 0
    )  # only beside inputs of the layers
    full = {1, last} if shared else {last, r.randrange(last)} if r.random() < 0.4 else {last}
    share, theta = r.choice((0.25, 0.25, 0.5, 1.0)), model.rope_theta
    local = dict(model.rope_scaling or {"rope_type": "default"}) | {"rope_theta": theta}
    proportional = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": 1e6}
    dense = model.num_layers == 5 and r.random() < 0.8
    own = r.choice((None, *(n for n in range(1, heads + 1) if heads % n == 0)))
    return {
        "global_head_dim": 2 * r.randint(2, 20), "num_global_key_value_heads": own,
        "attention_k_eq_v": r.random() < 0.7, "sliding_window": r.choice((3, 9, 20)),
        "layer_types": [FULL if n in full else SLIDING for n in range(model.num_layers)],
        "rope_parameters": {SLIDING: local, FULL: proportional}, "rope_scaling": None,
        "final_logit_softcapping": r.choice((None, 30.0, 5.0)), "hidden_size_per_layer_input": wide if dense else 0,
        "vocab_size_per_layer_input": model.vocab_size + 3, "num_kv_shared_layers": shared if dense else 0,
        "use_double_wide_mlp": dense and r.random() < 0.5, "enable_moe_block": not dense,
        "top_k_experts": None if dense else model.top_k,
    }  # fmt: skip


def _interval(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    last = r.choice((-1, model.num_layers - 1, 1))
    return {
        "moe_num_shared_experts": r.randint(0, 2), "moe_layer_start_index": r.randint(0, 1),
        "moe_layer_end_index": last, "moe_layer_interval": r.choice((1, 1, 2)),
        "num_nextn_predict_layers": int(model.has_mtp),
    }  # fmt: skip


def _multipliers(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    return {
        "embedding_multiplier": r.choice((1.0, 6.0, 12.0)), "residual_multiplier": r.choice((1.0, 0.22, 0.5)),
        "attention_multiplier": r.choice((0.0625, 0.125, 0.3)), "logits_scaling": r.choice((1.0, 3.0, 0.7)),
    }  # fmt: skip


def _llama4(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    published = {"use_qk_norm": True, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
                 "no_rope_layer_interval": 4}  # fmt: skip
    own = {"interleave_moe_layer_step": r.choice((1, 1, 2))}
    if r.random() < 0.5:
        return own | published | {"rope_scaling": r.choice((None, SCOUT))}
    return own | {
        "use_qk_norm": r.random() < 0.6, "attention_chunk_size": r.choice((12, 7)),
        "floor_scale": r.choice((8192, 16, 3)), "attn_scale": r.choice((0.1, 0.6)),
        "no_rope_layer_interval": r.choice((4, 2, 3)),
    }  # fmt: skip


def _lfm2(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    layers = range(model.num_layers)
    attention = r.sample(layers, r.randint(1, len(layers) - 1))
    return {
        "layer_types": [FULL if n in attention else "conv" for n in layers], "conv_L_cache": r.choice((2, 3, 3, 4)),
        "conv_bias": r.random() < 0.4, "num_dense_layers": r.randint(0, 1), "use_expert_bias": r.random() < 0.7,
        "routed_scaling_factor": r.choice((1.0, 1.7)),
    }  # fmt: skip


def _predicting(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    return {"num_nextn_predict_layers": int(model.has_mtp)}


def _indexer(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    rotated = 2 * r.randint(1, 6)
    return {
        "index_topk": r.randint(1, 30), "index_n_heads": r.randint(1, 9), "index_head_dim": rotated + r.randint(0, 20),
        "qk_rope_head_dim": rotated, "q_lora_rank": r.randint(5, 30), "kv_lora_rank": r.randint(5, 40),
    }  # fmt: skip


def _large4(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    """Layers read latents of the last layer of their kind that has its own."""
    layers = range(model.num_layers)
    rotated, sources, own = [r.randint(0, 1) for _ in layers], [], dict[int, int]()
    for n in layers:
        sources.append(r.choice((n, own.get(rotated[n], n))))
        if sources[n] == n:
            own[rotated[n]] = n
    return {
        key: value for key, value in _indexer(r, model).items() if key != "q_lora_rank"
    } | {
        "no_rope_layers": rotated, "kv_source_layers": sources, "final_logit_softcapping": r.choice((5.0, 30.0)),
        "indexer_types": ["full", *(r.choice(("full", "shared")) for _ in layers[1:])],
        "rope_parameters": r.choice((
            model.settings["rope_parameters"],
            {"rope_type": "default", "rope_theta": 1e4},
            {**model.settings["rope_parameters"], "mscale_all_dim": 0.5, "attention_factor": 1.3},
        )),
    }  # fmt: skip


def _qwen4(r: random.Random, model: TinyFamily) -> dict[str, Any]:
    pool = r.randint(1, 6)
    kinds = r.choice(("full_attention", "indexed_attention"))
    delta, ngram_size, heads = _delta(r, model), r.randint(2, 4), r.randint(1, 3)
    linear = [n + 1 for n, kind in enumerate(delta["layer_types"]) if kind != FULL]
    return delta | {
        "ple_layer_ids": r.sample(linear, r.randint(0, min(2, len(linear)))), "ngram_size": ngram_size,
        "heads_per_ngram": heads, "ple_embed_dim": (ngram_size - 1) * heads * r.choice((4, 7)),
        "ple_conv_kernel_size": r.randint(2, 4), "ngram_vocab_size_base": r.randint(20, 90),
        "make_ngram_vocab_size_divisible_by": r.choice((1, 8)), "split_ngram_parts": r.choice((1, 3)),
        "layer_types": [kinds if kind == FULL else kind for kind in delta["layer_types"]],
        "hc_count": r.randint(2, 5), "hc_lowrank": r.randint(3, 40), "indexer_n_heads": r.randint(1, 5),
        "indexer_head_dim": model.head_dim + r.randint(0, 20), "indexer_compress_ratio": pool,
        "indexer_budget": pool * r.randint(1, 8), "output_gate_type": r.choice((None, "silu", "sigmoid")),
    }  # fmt: skip


_FURTHER: Final[dict[str, Callable[[random.Random, TinyFamily], dict[str, Any]]]] = {
    "glm4_moe": lambda r, model: _predicting(r, model) | {
        "use_qk_norm": r.random() < 0.5, "partial_rotary_factor": r.choice((0.25, 0.5, 0.5, 0.75, 1.0)),
    },
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k25", "glm4_moe_lite"),
        lambda r, model: _predicting(r, model) | {"rope_interleave": r.random() < 0.7},
    ),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _indexer),
    "hy_v4": lambda r, model: _indexer(r, model) | {
        "hc_mult": r.randint(2, 5), "hc_magnitude": r.choice((1.0, 2.0, 2.7)), "hc_eps": r.choice((1e-6, 1e-2)),
        "swiglu_limit": r.choice((0.3, 1.0, 10.0)),
        "indexer_types": ["full", *(r.choice(("full", "shared")) for _ in range(model.num_layers - 1))],
    },
    "axk2": lambda r, model: _indexer(r, model) | {"gated_norm_rank": r.randint(1, 20)} | r.choice(
        ({}, {"n_group": None, "topk_group": None})
    ),
    "mistral_large4": _large4,
    "deepseek_ocr2": lambda r, model: {"topk_method": r.choice(("greedy", "group_limited_greedy"))},
    "dots3_note": lambda r, model: (indexer := _indexer(r, model)) | {
        "swa_num_attention_heads": (heads := r.randint(1, 4)), "swa_num_key_value_heads": heads,
        "swa_q_lora_rank": r.choice((indexer["q_lora_rank"], r.randint(5, 30))),
        "swa_kv_lora_rank": r.randint(5, 40), "swa_v_head_dim": r.randint(3, 20), "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 16 - r.choice((indexer["qk_rope_head_dim"], 8, 4, 2)),
        "shared_experts_intermediate_size": r.randint(5, 40), "swa_rope_theta": r.choice((1e3, 5e4)),
    },
    "minimax_m3": lambda r, model: {
        "index_head_dim": int(model.head_dim * model.settings["partial_rotary_factor"]) + r.randint(0, 20),
        "index_n_heads": model.num_kv_heads, "index_block_size": r.randint(1, 9), "index_topk_blocks": r.randint(1, 6),
        "index_local_blocks": r.randint(0, 1), "swiglu_limit": r.choice((0.3, 1.0, 7.0)),
        "shared_intermediate_size": r.randint(5, 70),
        "layer_types": [r.choice((FULL, "minimax_m3_sparse")) for _ in range(model.num_layers)],
    },
    "qwen2_moe": lambda r, model: r.choice(
        ({"use_sliding_window": False}, {"use_sliding_window": True, "sliding_window": 9})
    ),
    "minimax_m2": lambda r, model: {"rotary_dim": 2 * r.randint(1, model.head_dim // 2)},
    "ernie4_5_moe": _interval, "granitemoe": _multipliers,
    "granitemoe-shared": lambda r, model: _multipliers(r, model) | {"shared_intermediate_size": r.randint(5, 70)},
    "gemma4": _gemma4, "gemma4-small": _gemma4, "llama4": _llama4, "lfm2_moe": _lfm2, "qwen3_next": _delta,
    "qwen3_5_moe": _delta, "qwen4_exp": _qwen4,
    "qwen3_5": lambda r, model: {
        name: value for name, value in _delta(r, model).items() if name != "shared_expert_intermediate_size"
    },
    "gpt_oss": lambda r, model: {} if r.random() < 0.6 else {
        "layer_types": [r.choice((SLIDING, FULL)) for _ in range(model.num_layers)],
    },
    "hunyuan_v1_moe": lambda r, model: r.choice(
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    ),
    "mimo_v2_flash": lambda r, model: {
        "v_head_dim": r.randint(1, model.head_dim), "attention_value_scale": r.choice((0.707, 1.0, 2.0)),
        "rope_parameters": by_kind(5e6, 1e4, r.choice((0.25, 0.5, 1.0))),
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
        "rope_parameters": by_kind(5e6, 1e4, r.choice((0.5, 0.5, 1.0)), r.choice((0.5, 1.0, 1.0))),
    },
    "laguna": lambda r, model: {
        "num_attention_heads_per_layer": [model.num_kv_heads * r.randint(1, 3) for _ in range(model.num_layers)],
        "moe_router_logit_softcapping": r.choice((0.0, 0.7, 5.0)),
        "gating": r.choice((True, "per-head", "per-element")),
        "rope_parameters": by_kind(5e5, 1e4, r.choice((0.25, 0.5, 1.0))),
    },
}  # fmt: skip
