"""Tiny models of families composed of blocks that others have: one of each with its corners, and how to draw more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.models import drawn_described as described
from tests.tiny_models.deepseek import CASES as DEEPSEEK
from tests.tiny_models.deepseek import TinyDeepseek
from tests.tiny_models.described import TinyDescribed
from tests.tiny_models.families import (
    TinyErnie,
    TinyGlm4Moe,
    TinyGlm4MoeLite,
    TinyKimi,
    TinyMiniMaxM2,
    TinyOlmoe,
    TinyQwen2Moe,
)
from tests.tiny_models.gemma4 import TinyGemma4
from tests.tiny_models.gpt_oss import TinyGptOss
from tests.tiny_models.granite import TinyGranite
from tests.tiny_models.lfm2 import TinyLfm2
from tests.tiny_models.llama4 import TinyLlama4
from tests.tiny_models.qwen3_next import TinyQwen3Next, TinyQwen35Moe
from tests.tiny_models.writing import TinyModel

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SCOUT = LLAMA3 | {"high_freq_factor": 1.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}

# One model of each family, with its corners.
GLM = TinyGlm4Moe(
    use_qk_norm=True, num_experts=12, num_groups=4, top_groups=2, top_k=5, routed_scaling_factor=2.5,
    num_shared_experts=2, head_dim=24, partial_rotary_factor=0.25,
)  # fmt: skip
LITE = TinyGlm4MoeLite(
    num_experts=12, num_groups=4, top_groups=2, top_k=5, routed_scaling_factor=1.8, num_shared_experts=2, first_dense=2,
)  # fmt: skip
NEXT = TinyQwen3Next(
    num_layers=5, full_attention=(1, 4), num_experts=9, top_k=3, mlp_only_layers=(2,), has_mtp=True
)
EXAMPLES: dict[str, TinyModel] = {
    "qwen3_next": NEXT,
    # A first token's output is its values, normalised, times the sign of k . q: of this seed none is near zero.
    "qwen3_5_moe": TinyQwen35Moe(nested=True, has_mtp=True, expert_layout="fused", seed=1),
    "gemma4": TinyGemma4(num_experts=9, top_k=3),
    "gemma4-small": TinyGemma4(
        dense=True,
        num_layers=5,
        full=(1, 4),
        layer_input=10,
        num_shared=3,
        double_wide=True,
        attention_k_eq_v=False,
    ),
    "glm4_moe": GLM,
    "gpt_oss": TinyGptOss(top_k=3, num_experts=9),
    "glm4_moe_lite": LITE,
    "kimi_k25": TinyKimi(nested=True),
    "ernie4_5_moe": TinyErnie(num_layers=5, moe_interval=2, num_experts=9, top_k=4),
    "granitemoe": TinyGranite(num_experts=9, top_k=4),
    "granitemoe-shared": TinyGranite("GraniteMoeSharedForCausalLM", top_k=3, shared_intermediate_size=40),
    "lfm2_moe": TinyLfm2(num_experts=9, top_k=3, attention=(1, 3), conv_bias=True),
    "llama4": TinyLlama4(
        num_layers=5, moe_interval=2, attention_chunk_size=12, floor_scale=8, attn_scale=0.6
    ),
    "minimax_m2": TinyMiniMaxM2(num_experts=9, top_k=4),
    "olmoe": TinyOlmoe(top_k=3),
    "qwen2_moe": TinyQwen2Moe(mlp_only_layers=(1,), top_k=3, num_experts=9),
    "deepseek_v3": replace(DEEPSEEK["v3-groups"], rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek_v2": DEEPSEEK["v2-yarn"],
    **described.EXAMPLES,
}


def _sizes(r: random.Random, **also: Any) -> dict[str, Any]:
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
    } | also  # fmt: skip


def _groups(r: random.Random) -> dict[str, Any]:
    groups, of_group = r.choice((1, 1, 2, 3, 4)), r.randint(2, 5)
    best = r.randint(1, groups)
    return {
        "num_experts": groups * of_group, "num_groups": groups, "top_groups": best,
        "top_k": r.randint(1, min(6, best * of_group)), "num_shared_experts": r.randint(1, 3),
        "routed_scaling_factor": r.choice((1.0, 1.7, 2.5)),
    }  # fmt: skip


def _glm4_moe(r: random.Random) -> TinyModel:
    sizes = _sizes(r, head_dim=8 * r.randint(1, 4), num_layers=r.randint(2, 4), **_groups(r))
    return TinyGlm4Moe(
        **sizes, use_qk_norm=r.random() < 0.5, attention_bias=r.random() < 0.7, first_dense=r.randint(0, 1),
        partial_rotary_factor=r.choice((0.25, 0.5, 0.5, 0.75, 1.0)), num_mtp_layers=r.choice((0, 0, 1)),
    )  # fmt: skip


def _mla(r: random.Random) -> dict[str, Any]:
    yarn = YARN | {"mscale": r.choice((0.7, 1.0)), "mscale_all_dim": r.choice((0.4, 1.0))}
    return _sizes(
        r,
        **_groups(r),
        q_lora_rank=r.choice((None, r.randint(5, 30))),
        kv_lora_rank=r.randint(5, 40),
        qk_nope_head_dim=r.randint(3, 20),
        qk_rope_head_dim=2 * r.randint(1, 6),
        v_head_dim=r.randint(3, 20),
        first_dense=r.randint(0, 1),
        num_mtp_layers=r.choice((0, 0, 1)),
        rope_scaling=r.choice((None, yarn)),
    )


def _glm4_moe_lite(r: random.Random) -> TinyModel:
    return TinyGlm4MoeLite(**_mla(r), rope_interleave=r.random() < 0.7, attention_bias=r.random() < 0.2)


def _qwen2_moe(r: random.Random) -> TinyModel:
    return TinyQwen2Moe(
        **_sizes(r), attention_bias=r.random() < 0.7, shared_intermediate_size=r.randint(5, 70),
        mlp_only_layers=r.choice(((), (), (0,), (1,))), sliding_window=r.choice((None, None, 9)),
        max_window_layers=r.randint(0, 4),
    )  # fmt: skip


def _olmoe(r: random.Random) -> TinyModel:
    # The heads fill the hidden size; a wide one with a tied head has logits beyond 100, where float32 rounds by 1e-4.
    sizes = _sizes(r, attention_bias=r.random() < 0.3, head_dim=2 * r.randint(2, 4))
    return TinyOlmoe(**sizes | {"hidden_size": sizes["num_heads"] * sizes["head_dim"]})


def _minimax_m2(r: random.Random) -> TinyModel:
    rotary, rest = 2 * r.randint(1, 6), 2 * r.randint(0, 4)
    return TinyMiniMaxM2(
        **_sizes(r, head_dim=rotary + rest), rotary_dim=rotary, num_mtp_layers=r.choice((0, 0, 1))
    )


def _ernie4_5_moe(r: random.Random) -> TinyModel:
    num_layers = r.randint(2, 4)
    return TinyErnie(
        **_sizes(r, num_layers=num_layers), num_shared_experts=r.randint(0, 2), first_moe=r.randint(0, 1),
        last_moe=r.choice((-1, num_layers - 1, 1)), moe_interval=r.choice((1, 1, 2)),
        num_mtp_layers=r.choice((0, 0, 1)),
    )  # fmt: skip


def _granitemoe(r: random.Random) -> TinyModel:
    shared = r.choice((0, r.randint(5, 70)))
    return TinyGranite(
        f"GraniteMoe{'Shared' if shared else ''}ForCausalLM", **_sizes(r), shared_intermediate_size=shared,
        attention_bias=r.random() < 0.3, embedding_multiplier=r.choice((1.0, 6.0, 12.0)),
        residual_multiplier=r.choice((1.0, 0.22, 0.5)), attention_multiplier=r.choice((0.0625, 0.125, 0.3)),
        logits_scaling=r.choice((1.0, 3.0, 0.7)),
    )  # fmt: skip


def _delta(r: random.Random) -> dict[str, Any]:
    # Fewer than 5 values of a head: their norm magnifies what either side rounds beyond the comparison.
    num_layers, k_heads = r.randint(2, 5), r.randint(1, 3)
    return _sizes(
        r,
        num_layers=num_layers,
        full_attention=tuple(sorted(r.sample(range(num_layers), r.randint(1, 2)))),
        num_k_heads=k_heads,
        num_v_heads=k_heads * r.randint(1, 3),
        key_dim=r.randint(1, 40),
        value_dim=r.randint(5, 40),
        conv_kernel=r.choice((2, 4, 4, 4, 5)),
        head_dim=8 * r.randint(1, 4),
        partial_rotary_factor=r.choice((0.25, 0.25, 0.5, 1.0)),
        shared_intermediate_size=r.randint(9, 70),
        has_mtp=r.random() < 0.3,
    )


def _qwen3_next(r: random.Random) -> TinyModel:
    return TinyQwen3Next(
        **_delta(r), attention_bias=r.random() < 0.2, mlp_only_layers=r.choice(((), (), (0,), (1,)))
    )


def _gemma4(r: random.Random) -> TinyModel:
    sizes = _sizes(r, attention_bias=r.random() < 0.2, expert_layout="fused")
    last, heads = sizes["num_layers"] - 1, sizes["num_heads"]
    small: dict[str, Any] = {}
    if r.random() < 0.6:  # E2B and E4B, or one of their parts
        sizes |= {"num_layers": 5}
        last = 4
        small = {
            "dense": r.random() < 0.8,
            "layer_input": r.choice((0, r.randint(1, 20))),
            "double_wide": r.random() < 0.5,
            "has_unread": r.random() < 0.5,
        }
        if small["layer_input"]:  # transformers shares keys and values only beside inputs of the layers
            small["num_shared"] = r.choice((0, 1, 2, 3))
    full = tuple(sorted({last, r.randrange(last)} if r.random() < 0.4 else {last}))
    if small.get("num_shared"):  # a layer of each kind is left
        full = (1, last)
    return TinyGemma4(
        **sizes, global_head_dim=2 * r.randint(2, 20), attention_k_eq_v=r.random() < 0.7,
        full=full, **small,
        global_kv_heads=r.choice((None, *(n for n in range(1, heads + 1) if heads % n == 0))),
        sliding_window=r.choice((3, 9, 20)), partial_rotary_factor=r.choice((0.25, 0.25, 0.5, 1.0)),
        softcap=r.choice((None, 30.0, 5.0)), nested=r.random() < 0.5, published=r.random() < 0.7,
    )  # fmt: skip


def _gpt_oss(r: random.Random) -> TinyModel:
    sizes = _sizes(r, attention_bias=r.random() < 0.8, expert_layout="separate")
    kinds = tuple(r.choice(("sliding_attention", "full_attention")) for _ in range(sizes["num_layers"]))
    yarn = YARN | {"truncate": r.random() < 0.3}
    sizes["rope_scaling"] = r.choice((None, yarn, yarn, LINEAR))
    sizes["rope_form"] = "rope_parameters"  # without any, it is YaRN
    return TinyGptOss(**sizes, layer_types=r.choice((None, None, kinds)), sliding_window=r.choice((3, 9, 20)))


def _lfm2_moe(r: random.Random) -> TinyModel:
    sizes = _sizes(r)
    layers = range(sizes["num_layers"])
    return TinyLfm2(
        **sizes, attention=tuple(sorted(r.sample(layers, r.randint(1, len(layers) - 1)))), taps=r.choice((2, 3, 3, 4)),
        conv_bias=r.random() < 0.4, first_dense=r.randint(0, 1), use_expert_bias=r.random() < 0.7,
        routed_scaling_factor=r.choice((1.0, 1.7)),
    )  # fmt: skip


def _llama4(r: random.Random) -> TinyModel:
    published = r.random() < 0.5
    scalings = (None, None, SCOUT) if published else (None, LLAMA3, YARN)
    sizes = _sizes(r, top_k=1, attention_bias=r.random() < 0.3, rope_scaling=r.choice(scalings))
    sizes |= {"moe_interval": r.choice((1, 1, 2)), "nested": r.random() < 0.5}
    if published:
        return TinyLlama4(**sizes)
    return TinyLlama4(
        **sizes, use_qk_norm=r.random() < 0.6, attention_chunk_size=r.choice((12, 7)),
        floor_scale=r.choice((8192, 16, 3)), attn_scale=r.choice((0.1, 0.6)), no_rope_interval=r.choice((4, 2, 3)),
    )  # fmt: skip


def _described(name: str, r: random.Random) -> TinyModel:
    return described.drawn(name, r, _sizes(r), _groups(r))


def all_chosen(model: TinyModel) -> TinyModel:
    """A model of which rounding chooses no other experts: a token goes to all there are."""
    if isinstance(model, TinyLlama4):
        return replace(model, num_experts=1)
    if isinstance(model, TinyDescribed):
        return model.all_chosen()
    groups = {"num_groups": 1, "top_groups": 1} if "num_groups" in model.__dataclass_fields__ else {}
    return replace(model, top_k=model.num_experts, **groups)


DRAWN: dict[str, Callable[[random.Random], TinyModel]] = {
    "qwen3_moe": lambda r: TinyModel(**_sizes(r), mlp_only_layers=r.choice(((), (), (0,), (1,)))),
    "mixtral": lambda r: TinyModel(
        "MixtralForCausalLM", **_sizes(r, attention_bias=False), sliding_window=r.choice((None, 9))
    ),
    "deepseek_v3": lambda r: TinyDeepseek(**_mla(r), rope_interleave=r.random() < 0.7),
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe": lambda r: TinyQwen35Moe(**_delta(r), nested=r.random() < 0.5),
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
    "minimax_m2": _minimax_m2,
    "llama4": _llama4,
    "lfm2_moe": _lfm2_moe,
    "granitemoe": _granitemoe,
    "ernie4_5_moe": _ernie4_5_moe,
    "kimi": lambda r: TinyKimi(**_mla(r), nested=r.random() < 0.5),
    **{name: partial(_described, name) for name in described.EXAMPLES},
}
