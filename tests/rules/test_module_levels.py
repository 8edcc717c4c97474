"""`backend` of a rule: a module is computed with the kernels of its level, whatever the process runs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.models.model_files import open_model_files
from twofold.rules import placement
from twofold.rules.modules import modules_of
from twofold.step.model import LoadedModel

from tests.engine.level_runs import computed, ruled
from tests.engine.model_runs import Runner
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, TinyModel] = {
    "gqa": TinyModel(num_layers=3, mlp_only_layers=(1,)),
    "mla": tiny("deepseek_v3"),
    "gated_delta": tiny("qwen3_next"),
    "short_convolution": tiny("lfm2_moe"),
    "norm": tiny("gemma4"),
}
RULED = {
    "gqa": ("attention", "router", "experts", "dense", "embedding", "head"),
    "mla": ("attention", "shared_experts"),
    "gated_delta": ("gated_delta",),
    "short_convolution": ("short_convolution",),
    "norm": ("norm",),
}
"""Modules of each model that its own rule is tested on: together every class of modules."""
OTHER = "generic"
LEVELS = ops.runnable_levels()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_model(folder / name, replace(model, dtype="bfloat16"))
        for name, model in MODELS.items()
    }


def rule_file(folder: Path, text: str) -> Path:
    file = folder / "rules.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "level",
    [pytest.param(each, marks=() if each in (OTHER, "avx2") else pytest.mark.slow) for each in LEVELS],
)
def test_all_modules_at_a_level_are_a_process_at_that_level(
    models: dict[str, Path], tmp_path: Path, level: str
) -> None:
    out = tmp_path / "process.npz"
    subprocess.run(
        [sys.executable, "-m", "tests.engine.level_runs", str(out), *map(str, models.values())],
        cwd=ROOT,
        env=os.environ | {"TWOFOLD_ISA": level},
        check=True,
    )
    rules = rule_file(tmp_path, f"- {{match: all, backend: {level}}}")
    with np.load(out) as of_process:
        for name, expected in zip(models, of_process.values(), strict=True):
            np.testing.assert_array_equal(computed(ruled(models[name], rules)), expected, err_msg=name)


@pytest.mark.skipif(ops.isa_choice()[0] == OTHER, reason="the process runs the level that rules ask for")
@pytest.mark.parametrize(
    ("model", "kind"), [(model, kind) for model, kinds in RULED.items() for kind in kinds]
)
def test_modules_of_one_class_at_another_level(
    models: dict[str, Path], tmp_path: Path, model: str, kind: str
) -> None:
    """Equals a combination of the two levels' operators; threads and chunks change nothing; the rest stays."""
    rules = rule_file(tmp_path, f"- {{match: {{class: {kind}}}, backend: {OTHER}}}")
    found = computed(ruled(models[model], rules))
    np.testing.assert_array_equal(found, computed(put_together(models[model], kind)))
    np.testing.assert_array_equal(found, computed(ruled(models[model], rules, num_threads=1), (7, 1, 13)))
    is_same = np.array_equal(found, computed(ruled(models[model], None)))
    assert is_same == (kind == "embedding"), "rows of a table are exact at every level, products are not"


def put_together(directory: Path, kind: str) -> Runner:
    """Reference without rules: each operator runs on threads of its module's level."""
    files, pool = open_model_files(directory), ops.ThreadPool(2)
    views = [pool.at_level(OTHER) if kind in each.classes else pool for each in modules_of(files)]
    model = LoadedModel(files, pool)
    blocks, moe_layer = [], 0
    kernels = []
    for (block, weights), view in zip(files.blocks(), views[1:-1], strict=True):
        blocks.append(block.cpu(weights, view, moe_layer))
        if isinstance(block, ExpertBlock):
            kernels.append(view)
            moe_layer += 1
    model._decoder = ops.Decoder(blocks)
    model.lm_head = files.config.head.cpu(files.head, views[-1])
    runner = Runner(model)
    for layer, view in enumerate(kernels):
        runner.moe.store.set_kernels(layer, view)
    return runner


def test_a_level_that_cannot_run_is_refused(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "LEVELS", (*placement.LEVELS, "neon"))
    rules = rule_file(tmp_path, "- {match: {class: router}, device: auto}\n- {match: all, backend: neon}")
    message = f"rules.yaml:2: backend neon was given for model.embed_tokens: .*: {', '.join(LEVELS)}"
    with pytest.raises(ConfigError, match=message):
        ruled(models["gqa"], rules)
