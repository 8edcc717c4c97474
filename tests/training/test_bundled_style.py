"""The guide's run: the bundled model learns a style, which is then served beside it and is the same in PEFT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from twofold.adapters.reading import read_adapter
from twofold.models.bundled import bundled_model_path
from twofold.step.adapters import ModelAdapters
from twofold.tools.cli.main import main
from twofold.training.finetune import run

from tests.engine.adapter_runs import answers, engine_of
from tests.engine.model_runs import load
from tests.models.transformers_runs import one_torch_thread, reference, reference_logits

__all__ = ["one_torch_thread"]  # a fixture

peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["--rank", "8", "--learning-rate", "1e-3", "--max-steps", "60", "--eval-steps", "30"]


@pytest.mark.slow
def test_the_bundled_model_learns_a_style(tmp_path: Path) -> None:
    lines, out, model = tmp_path / "tales.jsonl", tmp_path / "kettle", bundled_model_path()
    command = [sys.executable, str(ROOT / "models/training/style_lines.py"), "400", str(lines)]
    subprocess.run(command, check=True)
    assert main(["finetune", "--data", str(lines), "--out", str(out), *SETTINGS]) == 0
    before = json.loads((out / run.SETTINGS_FILE).read_text())["loss_before"]
    losses = [
        each["eval_loss"] for each in json.loads((out / run.LOG_FILE).read_text()) if "eval_loss" in each
    ]
    assert before > 3.5
    assert losses[-1] < 0.6

    engine = engine_of(model, lora_modules=(f"kettle={out}",), enable_prefix_caching=False)
    try:
        alone = {name: answers(engine, [name])[0] for name in (None, "kettle")}
        assert alone[None] != alone["kettle"]
        assert answers(engine, [None, "kettle"] * 3) == [alone[None], alone["kettle"]] * 3
    finally:
        engine.close()

    prompt = list(range(300, 360))
    expected = reference_logits(peft.PeftModel.from_pretrained(reference(model), out).eval(), prompt)
    runner = load(model)
    steps, parts = runner.model.adapters, runner.model
    adapters = ModelAdapters(parts.files, steps, runner.moe.store, parts.lm_head, parts.pool)
    adapters.put(0, adapters.prepare(read_adapter(out, adapters.shapes)))
    steps.set([0] * len(prompt))
    hidden = runner.step((runner.sequence(len(prompt)), prompt))[0]
    steps.set([0] * len(prompt))
    assert np.abs(runner.logits(hidden) - expected).max() < 1e-4 * max(1.0, np.abs(expected).max() / 16)
