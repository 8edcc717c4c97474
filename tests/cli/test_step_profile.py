"""Where `twofold bench` says the time went: the parts sum to the whole, and both faces show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twofold.tools.cli.main import main

from tests.tiny_models.writing import TinyModel, write_tiny_model

ARGUMENTS = [
    "--prompt-tokens",
    "9",
    "--new-tokens",
    "8",
    "--repeats",
    "1",
    "--no-compare-transformers",
    "--no-ceilings",
]
NATIVE = {"embedding", "qkv", "keys_values", "attention", "output", "router", "experts", "head"}


def test_parts_sum_to_the_wall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path, TinyModel(mlp_only_layers=(1,), seed=1))
    assert main(["bench", str(model), "--json", "--accelerator", "none", *ARGUMENTS]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    for name in ("prefill", "decode"):
        split = profile[name]
        assert set(split["parts_us"]) == NATIVE | {"dense_ffn", "sampler", "python"}
        assert all(us > 0 for us in split["parts_us"].values())
        assert sum(split["parts_us"].values()) == pytest.approx(split["step_us"])
        assert split["python_share"] == pytest.approx(split["parts_us"]["python"] / split["step_us"])
    assert 1 <= profile["decode"]["steps"] <= 7


def test_the_table_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path, TinyModel())
    assert main(["bench", str(model), "--accelerator", "none", *ARGUMENTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0] for line in lines if line.rstrip().endswith("%")}
    assert rows == NATIVE | {"sampler", "python", "all"}
