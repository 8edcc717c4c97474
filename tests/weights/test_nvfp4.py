"""NVFP4 beyond its values (test_schemes.py): mixed checkpoints, files beside config.json, GGUF's scales of tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.models.model_files import open_model_files

from tests.engine.model_runs import load, random_prompt
from tests.models.gguf_encoders import nvfp4
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import tiny_config, tiny_weights, write_tiny_model
from tests.weights.scheme_cases import MODEL as LARGER
from tests.weights.scheme_cases import modelopt_fp8, modelopt_nvfp4

MODEL = replace(LARGER, hidden_size=64, moe_intermediate_size=64, num_heads=2, num_experts=4, vocab_size=267)


def write_mixed(
    directory: Path, quantization: dict[str, Any], beside: bool, **changes: Any
) -> dict[str, Any]:
    """Attention in FP8, experts in NVFP4, scales of a KV cache → values by name. `changes`: parts of one expert."""
    rng = np.random.default_rng(1)
    stored: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for name, weight in tiny_weights(MODEL).items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            stored[name] = torch.tensor(weight)
            continue
        make = modelopt_nvfp4 if ".experts." in name else modelopt_fp8
        parts, expected[name] = make(rng, *weight.shape)
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        if "k_proj" in name or "v_proj" in name:
            stored[f"{module}.{module[-6]}_scale"] = torch.tensor(0.5)
    for part, change in changes.items():
        name = f"model.layers.1.mlp.experts.1.up_proj.{part}"
        stored[name] = change(stored[name])
    write_tiny_model(directory, MODEL)
    save_file(stored, str(directory / "model.safetensors"))
    config = tiny_config(MODEL) | ({} if beside else {"quantization_config": quantization})
    (directory / "config.json").write_text(json.dumps(config))
    if beside:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return expected


def mixed() -> dict[str, Any]:
    layers = {
        name.removesuffix(".weight"): {"quant_algo": "NVFP4", "group_size": 16}
        if ".experts." in name
        else {"quant_algo": "FP8"}
        for name in tiny_weights(MODEL)
        if name.endswith("_proj.weight")
    }
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize("beside", [False, True])
def test_each_module_has_the_algorithm_that_the_configuration_names(
    tmp_path: Path, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="twofold")
    expected = write_mixed(tmp_path, mixed(), beside)
    files = open_model_files(tmp_path)
    assert set(files.expert_formats()) == {("nvfp4",) * 3}
    assert "scales of a quantised KV cache is not run; left out: 2 tensors *.k_scale" in caplog.text
    pool = ops.ThreadPool(1)
    for name, values in expected.items():
        matrix = files.tensors.matrix(name, values.shape)
        assert matrix.format == ("nvfp4" if ".experts." in name else "fp8")
        np.testing.assert_array_equal(ops.dequantise(pool, matrix), values)
    assert len(load(tmp_path).greedy(random_prompt(5), 3)[0]) == 3


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weight_scale", lambda t: (t.float() * -1).to(t.dtype), "a scale that is negative"),
        (
            "weight_scale",
            lambda t: torch.full_like(t, float("nan")),
            "a scale that is negative or not a number",
        ),
        ("weight_scale_2", lambda t: t * float("nan"), "a tensor's scale of nan"),
        ("weight_scale_2", lambda t: -t, "expected a positive number"),
        ("weight_scale_2", lambda t: t.repeat(2), r"weight_scale_2 is F32 \[2\], expected F32 \[1\]"),
        ("weight_scale", lambda t: t[:, :3].contiguous(), "weight_scale is F8_E4M3 .*, expected F8_E4M3"),
        ("weight", lambda t: t[:, :5].contiguous(), "10 columns, expected a multiple of 64 for NVFP4"),
    ],
)
def test_damaged_scales_are_refused(tmp_path: Path, part: str, change: Any, message: str) -> None:
    write_mixed(tmp_path, mixed(), False, **{part: change})
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_experts_without_weights_have_a_scale_of_zero(tmp_path: Path) -> None:
    """ModelOpt's output for a tensor of zeros."""
    write_mixed(tmp_path, mixed(), False, weight_scale_2=torch.zeros_like)
    matrix = open_model_files(tmp_path).expert_weights(1)[1][1]
    assert not ops.dequantise(ops.ThreadPool(1), matrix).any()


def write_scaled(path: Path, **scales: Any) -> Path:
    """A GGUF file with experts and q in NVFP4; `scales` by the rest of the name of a layer's tensor."""

    def add(writer: Any) -> None:
        for name, scale in scales.items():
            writer.add_tensor(f"blk.1.{name.replace('__', '.')}", np.array(scale, np.float32))

    kinds = lambda name: "NVFP4" if "_exps" in name or "attn_q." in name else "F32"  # noqa: E731
    return write_tiny_gguf(
        path,
        MODEL,
        type_of=kinds,
        encode=lambda values, kind: nvfp4(values.reshape(-1, values.shape[-1])).reshape(
            *values.shape[:-1], -1
        ),
        edit=add,
    )


def test_a_gguf_tensors_scale_heads_its_rows(tmp_path: Path) -> None:
    each = np.random.default_rng(1).uniform(0.5, 2, MODEL.num_experts).astype(np.float32)
    path = write_scaled(
        tmp_path / "m.gguf", ffn_up_exps__scale=each, ffn_down_exps__scale=[0.25], attn_q__input_scale=[3.0]
    )
    files = open_model_files(path)
    for expert, of_expert in enumerate(files.expert_weights(1)):
        for matrix, scale in zip(of_expert, (1.0, each[expert], 0.25), strict=True):
            assert (matrix.data[:, :4].copy().view(np.float32) == np.float32(scale)).all()
    assert len(load(path).greedy(random_prompt(5), 3)[0]) == 3


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ([1.0, 2.0, 3.0], "is F32 .3., expected F32 .1. or one for each"),
        ([np.inf], "a tensor's scale of inf"),
    ],
)
def test_a_gguf_tensors_damaged_scale_is_refused(tmp_path: Path, scale: Any, message: str) -> None:
    path = write_scaled(tmp_path / "m.gguf", ffn_up_exps__scale=scale)
    with pytest.raises(ModelLoadError, match=message):
        load(path)
