"""Quantised checkpoints of other tools: every value is what the tool's own definition makes of the stored tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.models.model_files import open_model_files
from twofold.tools.cli.main import main

from tests.engine.model_runs import load, random_prompt
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import tiny_config, tiny_weights, write_tiny_model
from tests.weights.scheme_cases import (
    AWQ,
    CASES,
    MODEL,
    NVFP4,
    Case,
    Parts,
    awq,
    compressed_tensors,
    float8_by_row,
    gptq,
    nvfp4,
    write,
    write_by_expert,
    write_config,
)

__all__ = ["AWQ", "awq", "float8_by_row", "gptq", "nvfp4"]


@pytest.mark.parametrize("name", list(CASES))
def test_every_value_is_the_tools_own(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[name]
    expected = write(tmp_path / "m", case)
    files = open_model_files(tmp_path / "m")
    pool = ops.ThreadPool(1)
    for tensor, values in expected.items():
        matrix = files.tensors.matrix(tensor, values.shape)
        assert matrix.format == case.format
        if case.format == "f16":
            values = values.astype(np.float16).astype(np.float32)
        np.testing.assert_allclose(ops.dequantise(pool, matrix), values, rtol=case.rounded, atol=0)
    assert set(files.expert_formats()) == {(case.format,) * 3}
    # Every stored tensor is known, sized and released.
    assert main(["doctor", str(tmp_path / "m"), "--port", "0", "--accelerator", "none"]) == 0
    ours = load(tmp_path / "m")
    assert len(ours.greedy(random_prompt(5), 3)[0]) == 3


def test_a_nested_text_part_has_its_own_configuration(tmp_path: Path) -> None:
    """Kimi-K2.5's: text_config holds quantization_config, its tensors have another beginning."""

    model = tiny("kimi_k25", nested=True, hidden_size=64, moe_intermediate_size=32)
    directory = write_tiny_model(tmp_path / "m", model)
    rng = np.random.default_rng(1)
    config, store = compressed_tensors(4, "group", 32)
    stored: Parts = {}
    expected: dict[str, Any] = {}
    for name, weight in tiny_weights(model).items():
        if ".mlp.experts." in name and name.endswith("_proj.weight"):
            parts, expected[name] = store(rng, *weight.shape)
            stored |= {
                f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()
            }
        else:
            stored[name] = torch.tensor(weight)
    for shard in directory.glob("*.safetensors*"):
        shard.unlink()
    save_file(stored, str(directory / "model.safetensors"))
    ignore = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ]
    written = tiny_config(model)
    written["text_config"]["quantization_config"] = config | {"ignore": ignore}
    (directory / "config.json").write_text(json.dumps(written))
    files = open_model_files(directory)
    assert set(files.expert_formats()) == {("q4_0",) * 3}
    for name, values in expected.items():
        ours = name.removeprefix("language_model.")
        np.testing.assert_array_equal(
            ops.dequantise(ops.ThreadPool(1), files.tensors.matrix(ours, values.shape)), values
        )
    assert len(load(directory).greedy(random_prompt(5), 3)[0]) == 3


@pytest.mark.parametrize(
    ("of_expert_3", "dynamic", "format"),
    [
        (None, {"-:.*experts\\.3\\..*": {}}, "f32"),
        ("gptq in 8 bits", {"+:.*experts\\.3\\..*": {"bits": 8, "group_size": 128}}, "int8"),
        ("gptq with groups of no block", {"+:.*experts\\.3\\..*": {"group_size": 48}}, "f16"),
    ],
)
def test_an_expert_may_be_stored_alone(
    tmp_path: Path, of_expert_3: str | None, dynamic: dict[str, Any], format: str
) -> None:
    """Each expert has its own format and values; a plain one is float32."""
    values = write_by_expert(tmp_path, of_expert_3, dynamic)
    files, pool = open_model_files(tmp_path), ops.ThreadPool(1)
    own = [(format if expert == 3 else "q4_0",) * 3 for expert in range(MODEL.num_experts)]
    assert set(files.expert_formats()) == {tuple(own)}
    for expert, three in enumerate(files.expert_weights(1)):
        for part, matrix in zip(("gate", "up", "down"), three, strict=True):
            expected = values[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"]
            rounded = format == "f16" and expert == 3
            got = ops.dequantise(pool, matrix)
            np.testing.assert_array_equal(got, expected.astype(np.float16) if rounded else expected)
    assert len(load(tmp_path).greedy(random_prompt(5), 3)[0]) == 3


INT4, OPT = CASES["int4 in groups of 32 (Kimi-K2.5's)"], CASES["modelopt nvfp4"]


def _changed(case: Case, **changes: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(case.config))
    (config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config).update(changes)
    return config


def _group(**changes: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(INT4.config))
    config["config_groups"]["group_0"].update(changes)
    return config


REFUSED = [
    (INT4, {"quant_method": "bitsandbytes"}, "'fbgemm_fp8', 'compressed-tensors', 'gptq', 'awq', 'modelopt'"),
    (INT4, {"quant_method": "compressed-tensors"}, "config_groups is None"),
    (INT4, _changed(INT4, num_bits=9), "int of 2 to 8 bits, or float of 4, 6 or 8"),
    (INT4, _changed(INT4, num_bits=8), "weight_scale has shape .*, expected a scale for 32 columns of each row"),
    (INT4, _changed(INT4, group_size=64), "weight_scale has shape .*, expected a scale for 64 columns of each row"),
    (INT4, _changed(INT4, strategy="block"), "block_structure is .*, expected rows and columns of a block"),
    (INT4, _changed(INT4, type="float", symmetric=False), "true for floats, which have no zero points"),
    (INT4, _changed(INT4, symmetric=False), "weight_zero_point is missing"),
    (INT4, _group(targets=["re:("]), "expected a regular expression"),
    (INT4, _group(targets=["re:.*self_attn.*"]), "is quantised, but .* has no group for model.layers.0.mlp.experts.0"),
    (INT4, INT4.config | {"ignore": ["re:.*experts.1.up_proj"]}, "no group for model.layers.0.mlp.experts.1.up_proj"),
    (INT4, INT4.config | {"ignore": "lm_head"}, "ignore is 'lm_head', expected a list"),
    (CASES["nvfp4"], _changed(CASES["nvfp4"], group_size=32), "groups of 16"),
    (CASES["nvfp4"], INT4.config, "weight_packed is U8 .*, expected I32"),
    (INT4, NVFP4, "weight_packed is I32 .*, expected U8"),
    (OPT, OPT.config | {"quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ', expected one of NVFP4, FP8, MIXED"),
    (OPT, OPT.config | {"quant_algo": "FP8"}, "weight is U8 .*, expected F8_E4M3"),
    (OPT, OPT.config | {"ignore": ["*experts.1.*"]}, "no group for model.layers.0.mlp.experts.1"),
    (OPT, OPT.config | {"ignore": "lm_head"}, "ignore is 'lm_head', expected a list"),
    (OPT, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers is None"),
    (OPT, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "has no group for"),
    (CASES["gptq"], _changed(CASES["gptq"], bits=5), "bits is 5, expected 2 or 3 or 4 or 8"),
    (CASES["gptq"], _changed(CASES["gptq"], group_size=0), "group_size is 0"),
    (CASES["gptq"], _changed(CASES["gptq"], group_size=32), "scales is F16 .*, expected F16 or BF16"),
    (CASES["gptq"], _changed(CASES["gptq"], dynamic={"+:(": {}}), "expected a regular expression"),
    (CASES["awq"], _changed(CASES["awq"], version="marlin"), "version is 'marlin'"),
]  # fmt: skip
WRONG_CONFIGS = [
    (CASES["gptq"], _changed(CASES["gptq"], checkpoint_format="gptq_v2"), "a zero point other than 8, which sym"),
    (CASES["gptq with act-order"], _changed(CASES["gptq with act-order"], desc_act=False), "which desc_act denies"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config", "message"), REFUSED)
def test_what_contradicts_the_configuration_is_refused_by_headers(
    tmp_path: Path, case: Case, config: dict[str, Any], message: str
) -> None:
    write(tmp_path, case)
    write_config(tmp_path, config)
    with pytest.raises(ModelLoadError, match=message):
        open_model_files(tmp_path)


@pytest.mark.parametrize(("case", "config", "message"), WRONG_CONFIGS)
def test_what_contradicts_it_in_numbers_is_refused_when_read(
    tmp_path: Path, case: Case, config: dict[str, Any], message: str
) -> None:
    write(tmp_path, case)
    write_config(tmp_path, config)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)
