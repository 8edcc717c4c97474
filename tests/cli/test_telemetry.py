"""`twofold telemetry summary`: which database it reads, and what it says when there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from twofold.tools.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TWOFOLD_TELEMETRY_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def empty_database(path: Path) -> None:
    from twofold.telemetry.writer import open_sink

    open_sink(f"sqlite:///{path}").close()


def test_without_any_database_it_says_what_to_give(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["telemetry", "summary"]) == 2
    said = capsys.readouterr().err
    assert "--telemetry-url sqlite:///FILE" in said
    assert len(said.splitlines()) == 1


def test_the_one_that_make_run_writes_is_read_without_being_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_database(folder / "other.db")
    named = main(["telemetry", "summary", "--telemetry-url", "sqlite:///other.db"]), capsys.readouterr()
    shutil.copy(folder / "other.db", folder / "twofold.db")
    unnamed = main(["telemetry", "summary"]), capsys.readouterr()
    assert unnamed[0] == named[0]
    assert unnamed[1].out == named[1].out
    assert unnamed[1].err.replace("twofold.db", "other.db") == named[1].err
    assert "no telemetry database given" not in unnamed[1].err


def test_the_environment_comes_before_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_database(folder / "twofold.db")
    monkeypatch.setenv("TWOFOLD_TELEMETRY_URL", "sqlite:///nowhere/x.db")
    assert main(["telemetry", "summary"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_an_old_database_is_upgraded_by_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.telemetry.test_upgrade import old_file

    old_file(folder / "twofold.db", 3)
    assert main(["telemetry", "summary"]) == 2
    assert "twofold telemetry upgrade --telemetry-url sqlite:///" in capsys.readouterr().err
    assert main(["telemetry", "upgrade"]) == 0
    assert capsys.readouterr().out.startswith("schema version ")
    assert main(["telemetry", "summary"]) == 0
    assert (folder / "twofold.db.v3.bak").is_file()


def test_nothing_is_made_where_there_is_nothing_to_upgrade(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["telemetry", "upgrade", "--telemetry-url", "sqlite:///none.db"]) == 2
    assert "none.db does not exist" in capsys.readouterr().err
    assert not list(folder.iterdir())
