"""An FP8 checkpoint computes what a float32 checkpoint of the same values does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.errors import ModelLoadError

from tests.engine.model_runs import load, random_prompt
from tests.tiny_models.table import linear_layers, tiny
from tests.tiny_models.writing import (
    TinyModel,
    tiny_config,
    tiny_weights,
    write_safetensors,
    write_tiny_model,
)
from tests.weights.fp8_models import to_fp8, write_both

# Several blocks of 128 in each direction, the last ones partial.
MODEL = TinyModel(hidden_size=160, moe_intermediate_size=144, num_heads=8, head_dim=32, num_layers=2)


NEXT = {
    "num_layers": 2,
    "layer_types": linear_layers(2, 1),
    "linear_key_head_dim": 40,
    "linear_value_head_dim": 36,
    "shared_expert_intermediate_size": 130,
}


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        replace(MODEL, mlp_only_layers=(0,), intermediate_size=200),
        tiny("minimax_m2", hidden_size=160, moe_intermediate_size=144, num_heads=8, num_layers=2, top_k=8),
        tiny("qwen3_next", hidden_size=160, **NEXT),
        tiny("qwen3_5_moe", hidden_size=160, expert_layout="separate", **NEXT),
    ],
    ids=["qwen3", "dense-layer", "minimax_m2", "qwen3_next", "qwen3_5_moe"],
)
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, model: TinyModel) -> None:
    fp8, float32 = write_both(tmp_path, model)
    ours, reference = load(fp8), load(float32)
    assert set(ours.model.files.expert_formats()) == {("fp8",) * 3}
    prompt = random_prompt(20)
    got = ours.logits(ours.prefill(prompt)[1])
    expected = reference.logits(reference.prefill(prompt)[1])
    assert np.abs(expected).max() > 1
    assert np.abs(got - expected).max() < 1e-3
    answer, _ = ours.greedy(prompt, 12)
    assert answer == reference.greedy(prompt, 12)[0]


@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.experts.3.down_proj"])
def test_a_nan_is_refused(tmp_path: Path, part: str) -> None:
    eight: dict[str, Any] = {}
    for name, weight in tiny_weights(MODEL).items():
        eight[name] = weight
        if "_proj.weight" in name:
            codes, grid = to_fp8(weight)
            codes[-1, 5] = 0xFF if name == f"model.layers.1.{part}.weight" else codes[-1, 5]
            eight |= {name: codes, f"{name}_scale_inv": grid}
    directory = write_tiny_model(tmp_path / "nan", MODEL)
    write_safetensors(directory / "model.safetensors", eight, "float32")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = tiny_config(MODEL) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="holds a NaN or an infinity"):
        load(directory)
