"""Dense models, mixtures of no experts: every command and accelerator takes them, and counts no experts."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.models.sizing import measure_model
from twofold.telemetry.writer import open_sink
from twofold.tools.cli.main import main

from tests.engine.model_runs import random_prompt
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model

MODEL = replace(EXAMPLES["qwen3"], hidden_size=64, dtype="bfloat16")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", MODEL)


def answer(path: Path, accelerator: str = "none", telemetry: str | None = None) -> list[int]:
    config = EngineConfig(model=str(path), accelerator=accelerator, cpu_threads=1)
    sink = telemetry and open_sink(telemetry)
    engine = Engine.load(config, telemetry=sink or None)
    tokens: list[int] = []
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine.generate(random_prompt(40), sampling, lambda chunk: tokens.extend(chunk.token_ids))
    assert engine.stats().placement.hits == engine.stats().placement.cpu_misses == 0
    assert (engine.info.num_layers, engine.info.num_experts) == (0, 0)
    engine.close()
    if sink:
        sink.close()
    assert len(tokens) == 12
    return tokens


def test_every_accelerator_and_a_packed_model_give_the_same_answer(directory: Path, tmp_path: Path) -> None:
    expected = answer(directory)
    assert answer(directory, "emulated:rtx4090-pcie4") == expected
    assert main(["pack", str(directory), str(tmp_path / "packed")]) == 0
    assert answer(tmp_path / "packed") == expected


def test_a_gguf_file_gives_the_same_answer(directory: Path, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "m.gguf", MODEL, type_of=lambda name: "BF16")
    assert answer(file) == answer(directory)


def test_doctor_measures_it(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(directory)]) == 0
    assert "Qwen3ForCausalLM, no experts (a dense model)" in capsys.readouterr().out
    size = measure_model(directory)
    assert (size.num_experts_total, size.expert_bytes, size.one_expert_bytes) == (0, 0, 0)
    assert size.dense_bytes > 0


def test_quantising_keeps_its_answers_near(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["quantize", str(directory), str(tmp_path / "q8"), "--format", "q8_0", "--max-tokens", "32"])
        == 0
    )
    assert "as good as the source" in capsys.readouterr().out
    answer(tmp_path / "q8")


def test_telemetry_has_its_steps_on_an_emulated_clock(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    answer(directory, "emulated:rtx4090-pcie4", telemetry=f"sqlite:///{path}")
    with sqlite3.connect(path) as database:
        ((layers, experts, slots),) = database.execute("select num_layers, num_experts, num_slots from run")
        assert (layers, experts, slots) == (0, 0, 0)
        ((steps, layer_rows),) = database.execute(
            "select (select count(*) from step), (select count(*) from token_layer)"
        )
    assert steps >= 12
    assert layer_rows == 0
