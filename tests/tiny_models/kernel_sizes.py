"""Tiny models of every family with sizes for which there are kernels."""

from __future__ import annotations

from typing import Any

from twofold.weights.weight_format import FORMATS as LAYOUTS

from tests.tiny_models.family import TinyFamily
from tests.tiny_models.table import EXAMPLES, FULL, SLIDING, tiny
from tests.tiny_models.writing import TinyModel

QWEN = TinyModel(
    dtype="bfloat16", hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=3, mlp_only_layers=(1,),
    num_experts=10, moe_intermediate_size=32,
)  # fmt: skip
# Sizes of heads for which there are kernels.
_USUAL: dict[str, Any] = {"dtype": "bfloat16", "hidden_size": 64, "num_heads": 4, "head_dim": 64}
_DELTA: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256}
_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_group": 4, "topk_group": 2},
    "glm4_moe": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "gpt_oss": {"sliding_window": 5},
    "gemma4": {"global_head_dim": 512, "sliding_window": 5, "nested": True},
    "gemma4-small": {
        "global_head_dim": 128,
        "sliding_window": 5,
        "num_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "num_kv_shared_layers": 2,
    },
    "olmoe": {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 2},
    "minimax_m2": {"head_dim": 128, "rotary_dim": 64},
    "minimax_m3": {"head_dim": 128, "partial_rotary_factor": 0.5, "index_head_dim": 64},
    "qwen3_next": _DELTA,
    "qwen3_5": _DELTA,
    "qwen4_exp": _DELTA | {"indexer_head_dim": 96},
    "qwen3_5_moe": _DELTA | {"linear_key_head_dim": 130, "linear_value_head_dim": 33},
    "llama4": {"attention_chunk_size": 8, "floor_scale": 4},
    "mimo_v2_flash": {"head_dim": 192},
    **{name: {"head_dim": 128} for name in ("glm4v_moe", "laguna", "step3p7")},
    **{name: {"hidden_size": 256} for name in ("granitemoe_swa", "ernie4_5_vl_moe")},
}
MODELS = {
    "qwen3_moe": QWEN,
    "qwen3_moe-f32-biases": TinyModel(
        dtype="float32", hidden_size=64, num_heads=3, num_kv_heads=1, head_dim=128, num_layers=2, attention_bias=True
    ),
    "mixtral-window": TinyModel(
        "MixtralForCausalLM", dtype="float16", hidden_size=64, num_heads=4, head_dim=64, num_layers=2, sliding_window=9
    ),
    "gpt_oss-mxfp4": tiny(
        "gpt_oss", dtype="bfloat16", hidden_size=96, moe_intermediate_size=64, head_dim=64, mxfp4=True
    ),
    **{
        name: model.resized(**_USUAL | _SIZES.get(name, {}))
        for name, model in EXAMPLES.items()
        if isinstance(model, TinyFamily)
    },
}  # fmt: skip
FORMATS = tuple(name for name, layout in LAYOUTS.items() if layout.quantised and layout.block_columns > 1)
