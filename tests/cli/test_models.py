"""`twofold models`: what loads, and what models on disk take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from twofold.models.registry import ARCHITECTURES
from twofold.tools.cli.main import main

from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import TinyModel, write_tiny_model


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def test_models_lists_what_loads_and_the_models_options(tiny, tmp_path, capsys):
    assert main(["models", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert {name for family in known["families"] for name in family["classes"]} == set(ARCHITECTURES)
    assert all(family["models"].endswith(".") for family in known["families"])
    assert main(["models"]) == 0
    assert "Q4_K" in capsys.readouterr().out

    assert main(["models", "qwen3_moe", "gemma3"]) == 0
    shown = capsys.readouterr().out
    parts = ("project", "norm", "rotate", "select", "attend", "out")
    assert [shown.index(f"\n    {part} ") for part in parts] == sorted(
        shown.index(f"\n    {part} ") for part in parts
    )
    assert "Window (size 4096)" in shown
    assert main(["models", "deepseek_v3", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["deepseek_v3"]

    shutil.copytree(tiny, tmp_path / "some" / "tiny")
    write_tiny_gguf(tmp_path / "one.gguf", TinyModel())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    assert main(["models", str(tmp_path), "--json"]) == 2
    entries = {Path(e["path"]).name: e for e in json.loads(capsys.readouterr().out)["models"]}
    assert set(entries) == {"tiny", "one.gguf", "broken"}
    assert "config.json" in entries["broken"]["error"]
    assert entries["tiny"]["largest_context_here"] == entries["one.gguf"]["largest_context_here"] > 0
    assert main(["models", tiny]) == 0
    shown = capsys.readouterr().out
    assert "fits here up to" in shown
    assert "embeddings: 48 elements, last pooling (the default), normalised" in shown
    assert main(["models", str(tmp_path / "some" / "tiny" / "nothing")]) == 2
    assert "no model; give" in capsys.readouterr().err


def test_an_unsupported_family_is_one_short_line_of_models(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    assert main(["models", str(tmp_path)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "architecture 'FooForCausalLM' is not supported" in line
        assert "see `twofold models`" in line
        assert len(line.replace(str(tmp_path), "")) < 200
