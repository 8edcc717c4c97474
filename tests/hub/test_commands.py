"""`twofold pull`, `list`, `rm`, and other commands that take a model by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from twofold.tools.cli.hub.model_path import served_names
from twofold.tools.cli.main import main
from twofold.vision.source import find_projector
from twofold.weights.gguf_file import model_name

from tests.hub.small_hub import COMMIT, SmallHub

NAME = "test/Tiny-MoE"


def test_a_model_is_pulled_listed_used_and_removed(
    tiny: SmallHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list"]) == 0
    assert "no models" in capsys.readouterr().out
    assert main(["pull", NAME]) == 0
    pulled = capsys.readouterr()
    path = cache / "models--test--Tiny-MoE" / "snapshots" / COMMIT
    assert pulled.out == f"{path}\n"
    assert f"at commit {COMMIT[:12]} (main)" in pulled.err
    assert main(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["name"], row["revision"] == (NAME, COMMIT)
    assert row["path"] == str(path)
    assert row["bytes"] == sum(file.stat().st_size for file in path.iterdir())
    assert main(["list"]) == 0
    assert NAME in capsys.readouterr().out
    assert main(["models", NAME]) == 0
    assert main(["generate", NAME, "--prompt", "a b", "--raw", "--max-tokens", "2", "--json"]) == 0
    assert main(["rm", NAME]) == 2  # standard input is no terminal
    assert "give --yes" in capsys.readouterr().err
    assert main(["rm", NAME, "--yes"]) == 0
    assert not any(file.is_file() or file.is_symlink() for file in cache.rglob("*"))
    assert main(["rm", NAME, "--yes"]) == 2
    assert "no such model" in capsys.readouterr().err


def test_removing_one_quantisation_keeps_the_other(
    ggufs: SmallHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "test/Tiny-GGUF:Q8_0"]) == 0
    assert main(["pull", "test/Tiny-GGUF"]) == 0
    assert main(["rm", "test/Tiny-GGUF:Q8_0", "--yes"]) == 0
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    (left,) = json.loads(capsys.readouterr().out)["models"]
    assert left["name"] == "test/Tiny-GGUF:Q4_K_M"
    assert Path(left["path"]).is_file()
    assert find_projector(Path(left["path"])) is not None, "both use it"
    assert main(["rm", "test/Tiny-GGUF:Q4_K_M", "--yes"]) == 0
    assert not any(file.is_file() or file.is_symlink() for file in cache.rglob("*"))


def test_a_server_is_named_after_the_repository(tiny: SmallHub, cache: Path) -> None:
    snapshot = cache / "models--test--Tiny-MoE" / "snapshots" / COMMIT
    assert model_name(str(snapshot)) == NAME
    assert model_name(f"{snapshot}/M-Q4_K_M.gguf") == "M-Q4_K_M"


def test_clients_may_use_the_configured_model_name(ggufs: SmallHub, tmp_path: Path) -> None:
    main(["pull", "test/Tiny-GGUF:Q4_K_M"])
    assert served_names("test/Tiny-GGUF:Q4_K_M") == ("M-Q4_K_M", "test/Tiny-GGUF:Q4_K_M")
    assert served_names(str(tmp_path)) == ()


def test_commands_fetch_a_missing_model(
    tiny: SmallHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", f"hf:{NAME}", str(tmp_path / "packed")]) == 0
    assert (tmp_path / "packed" / "config.json").is_file()
    assert main(["doctor", NAME, "--json"]) in (0, 1)
    checks = {
        check["name"]: check for check in json.loads(capsys.readouterr().out.splitlines()[-1])["checks"]
    }
    assert checks["model"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "test/None", "--prompt", "x"], "no such repository"),
        (["pull", "./here"], "expected hf:ORG/REPO"),
        (["pull", NAME, "--revision", "v7"], "no revision 'v7'"),
        (["generate", f"{NAME}@v1", "--revision", "v2", "--prompt", "x"], "different revisions"),
    ],
)
def test_refusals_are_one_line(
    tiny: SmallHub, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_killed_download_is_resumed_by_the_next_process(tiny: SmallHub, cache: Path) -> None:
    """The client's own settings, from the environment, in a process of its own."""
    size = len(tiny.repositories[NAME].files["model.safetensors"])
    tiny.cut_after, tiny.ignores_ranges = size // 2, True
    command = [sys.executable, "-m", "twofold.tools.cli", "pull", NAME]
    first = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert first.returncode == 2, first.stderr
    tiny.cut_after, tiny.ignores_ranges = None, False
    tiny.requests.clear()
    second = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert tiny.ranges() == [f"bytes={size // 2}-"]
