"""Names of modules in transformers, which PEFT writes into adapters, lead to the engine's matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from twofold.models.model_files import open_model_files
from twofold.step.adapters import shapes_of

from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "granitemoe_swa",
        "hy_v3",
        "llama4",
        "exaone_moe",
        "step3p7",
        "qwen3_vl_moe",
        "gemma4",
        "deepseek_v3",
    ],
)
def test_names_of_modules(tmp_path: Path, family: str) -> None:
    write_tiny_model(tmp_path, EXAMPLES[family])
    base = shapes_of(open_model_files(tmp_path))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    is_text = type(config) in transformers.AutoModelForCausalLM._model_mapping
    model = (
        transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    ).from_config(config)
    found = set()
    for name, parameter in model.named_parameters():
        if "visual" in name or "vision" in name or "multi_modal" in name:
            continue
        if name.endswith("experts.down_proj"):
            module = base.experts_name(name.removesuffix(".down_proj"))
            assert module is not None, name
            assert base.experts[module].num_experts == len(parameter)
        elif parameter.ndim == 2 and name.endswith(".weight"):
            matrix = base.matrix_name(name.removesuffix(".weight"))
            assert matrix is not None, name
            assert base.shape_of(matrix) == tuple(parameter.shape), name
            found.add(matrix)
    assert found >= base.matrices.keys() - base.replaceable
