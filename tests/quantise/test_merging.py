"""A merged model computes what its base computes with the adapter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from twofold.adapters.reading import read_adapter
from twofold.step.adapters import shapes_of
from twofold.tools.cli.main import main

from tests.engine.adapter_files import adapters_of, write_adapter
from tests.engine.model_runs import load, random_prompt
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

PROMPT = random_prompt(40)


def written(root: Path, model: str | TinyModel, *, ends: bool = False) -> tuple[Path, Path]:
    """A model, and an adapter of all matrices that adapters change; ends: of embedding and head alone."""
    directory = write_tiny_model(root / "model", EXAMPLES[model] if isinstance(model, str) else model)
    runner = load(directory)
    shapes = shapes_of(runner.model.files)
    packed = {name for name in shapes.matrices if name in adapters_of(runner)._matrices}
    wanted = shapes.replaceable if ends else packed - shapes.replaceable
    matrices = {name: shape for name, shape in shapes.matrices.items() if name in wanted}
    changed = dataclasses.replace(
        shapes, matrices=matrices, experts={} if ends else shapes.experts, replaceable=frozenset()
    )
    return directory, write_adapter(root / "adapter", changed, 3, size=0.2)


def logits_of(directory: Path, adapter: Path | None) -> np.ndarray:
    runner = load(directory)
    if adapter is not None:
        adapters = adapters_of(runner)
        adapters.put(0, adapters.prepare(read_adapter(adapter, adapters.shapes)))
        runner.model.adapters.set([0] * len(PROMPT))
    return runner.logits(runner.prefill(PROMPT)[1])


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "granitemoe"]
)
def test_a_merged_model_is_its_base_with_the_adapter(family: str, tmp_path: Path) -> None:
    directory, adapter = written(tmp_path, family)
    expected = logits_of(directory, adapter)
    arguments = ["merge", directory, adapter, tmp_path / "out", "--format", "f32", "--max-tokens", 0]
    assert main(list(map(str, arguments))) == 0
    np.testing.assert_allclose(logits_of(tmp_path / "out", None), expected, rtol=0, atol=2e-4)
    assert np.abs(expected - logits_of(directory, None)).max() > 0.05


def test_the_cost_of_a_format_is_measured_against_base_and_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, adapter = written(tmp_path, "qwen3_moe")
    text = tmp_path / "text.txt"
    text.write_text("the cat and the king " * 20)
    arguments = ["merge", directory, adapter, tmp_path / "out", "--text", text, "--max-tokens", 64, "--json"]
    assert main(list(map(str, arguments))) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["tensors_by_format"]) <= {"bf16", "f32"}
    assert 0 < report["quality"]["kl_mean"] < 0.05  # of bfloat16; the adapter itself changes far more


def test_what_cannot_be_merged_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tied = dataclasses.replace(EXAMPLES["qwen3_moe"], tie_word_embeddings=True)
    directory, adapter = written(tmp_path, tied, ends=True)
    for path, reason in ((adapter, "this model ties"), (directory, "adapter_model.safetensors")):
        assert main(["merge", str(directory), str(path), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert reason in error
    assert not (tmp_path / "out").exists()
