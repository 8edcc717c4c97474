"""Names of tensors in GGUF files: the engine's, which write the tiny models' files, are the gguf package's."""

from __future__ import annotations

import re

import gguf
import pytest

from tests.tiny_models.family import TinyFamily
from tests.tiny_models.gguf_tensors import named
from tests.tiny_models.table import EXAMPLES

LIKE = {
    "hy_v3": "dots1", "mellum": "qwen3moe", "laguna": "dots1", "granite_swa": "granitemoe", "deepseek32": "glm-dsa",
    "hy_v4": "glm-dsa", "dots3note": "glm-dsa", "minimax-m3": "minimax-m2",
    "qwen4exp": "qwen35moe",
}  # fmt: skip
"""Architectures that the package does not know → one with the same names."""
IN_GGUF = {
    name: model for name, model in EXAMPLES.items() if isinstance(model, TinyFamily) and model.row.gguf
}


def stem(name: str) -> str:
    return re.sub(r"\.(weight|bias)$", "", name.replace("e_score_correction_bias", "e_score_correction.bias"))


@pytest.mark.parametrize("family", IN_GGUF)
def test_names_are_those_of_the_package(family: str) -> None:
    model = IN_GGUF[family]
    name = LIKE.get(model.row.gguf, model.row.gguf)
    known = next(arch for arch, of_package in gguf.MODEL_ARCH_NAMES.items() if of_package == name)
    table = gguf.get_tensor_name_map(known, model.num_layers)
    pairs = [(table.get_name(stem(model.published(ours))), stem(theirs)) for ours, theirs in named(model)]
    reported = [pair for pair in pairs if pair[0] is not None]
    assert [pair for pair in reported if pair[0] != pair[1]] == []
    assert len(reported) >= 7 * model.num_layers
