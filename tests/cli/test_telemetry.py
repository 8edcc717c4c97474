"""`twofold telemetry`: which database it reads, what its actions print, and how they refuse bad input."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
from twofold.tools.cli.main import main

from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TWOFOLD_TELEMETRY_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def empty_database(path: Path) -> None:
    from twofold.telemetry.writer import open_sink

    open_sink(f"sqlite:///{path}").close()


def test_a_missing_database_names_the_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["telemetry", "summary"]) == 2
    printed = capsys.readouterr().err
    assert "--telemetry-url sqlite:///FILE" in printed
    assert len(printed.splitlines()) == 1


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
    from tests.telemetry.old_files import old_file

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


def recorded(path: Path, runs: int = 2) -> None:
    from twofold.telemetry.writer import open_sink

    for number in range(runs):
        clock = ManualClock(1_700_000_000.0 + 100 * number)
        sink = open_sink(f"sqlite:///{path}", now=clock)
        synthetic_history(sink, clock, seconds=2 + number)
        sink.close()


def test_runs_lists_every_run_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(folder / "twofold.db")
    assert main(["telemetry", "runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "2", "1"]
    assert "(emulated)" in lines[1]
    assert " expert " in lines[1]
    assert main(["telemetry", "runs", "--json", "--limit", "1"]) == 0
    (facts,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (facts["run_id"], facts["requests"], facts["lost_events"]) == (2, 2, 0)


def test_a_named_run_is_listed_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from twofold.tools.cli.model_options import open_telemetry

    flags = {"telemetry_url": "sqlite:///twofold.db", "run_name": "eight slots", "run_tag": ["a=1", "cold"]}
    sink = open_telemetry(argparse.Namespace(**flags))
    assert sink is not None
    sink.begin_run(run_info())
    sink.another_run().begin_run(run_info("none"))
    sink.close()
    assert main(["telemetry", "runs", "--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        facts = json.loads(line)
        assert (facts["run_name"], facts["run_tags"]) == ("eight slots", ["a=1", "cold"])
    assert main(["telemetry", "runs"]) == 0
    assert capsys.readouterr().out.count("eight slots #a=1 #cold") == 2
    for flag, value in (("--run-tag", "a b"), ("--run-tag", "a,b"), ("--run-name", "x" * 101)):
        assert main(["serve", flag, value]) == 2
        assert f"{flag} was given" in capsys.readouterr().err


def test_export_writes_what_was_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(folder / "twofold.db")
    flags = ["--perfetto", "trace.json", "--csv", "tables", "--run", "1"]
    assert main(["telemetry", "export", *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("trace.json: ")
    assert "of run 1" in printed[0]
    assert "emulated" in printed[0]
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["run"] == 1
    assert f"{len(trace['traceEvents']):,} trace events" in printed[0]
    assert printed[1].startswith("tables: run 1, ")
    assert (folder / "tables" / "token_expert.csv").stat().st_size > 1000


def test_check_exits_with_1_where_events_were_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sqlite3

    recorded(folder / "twofold.db", runs=1)
    assert main(["telemetry", "check"]) == 0
    assert capsys.readouterr().out.endswith("problems: none\n")
    with sqlite3.connect(folder / "twofold.db") as database:
        database.execute("INSERT INTO dropped VALUES (1, 'upload', 'ring', 1.0, 3)")
    assert main(["telemetry", "check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ["run 1: 3 events were lost"]


def test_prune_lists_what_it_would_delete_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(folder / "twofold.db")
    assert main(["telemetry", "prune", "--older-than", "1d", "--dry-run"]) == 0
    tried = capsys.readouterr().out
    assert main(["telemetry", "prune", "--older-than", "1d"]) == 0
    done = capsys.readouterr().out
    assert tried.count("would delete run ") == 2
    assert done == tried.replace("would delete", "deleted").replace("would have", "has")
    assert main(["telemetry", "runs"]) == 0
    assert "no run yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["export"], "give --perfetto FILE, --parquet DIR or --csv DIR"),
        (["export", "--perfetto", "nowhere/x.json"], "directory nowhere does not exist"),
        (["export", "--perfetto", "."], "expected a file name"),
        (["export", "--csv", "twofold.db"], "cannot be used as a directory"),
        (["export", "--csv", "out", "--run", "9"], "holds no run 9; it has runs 1 to 2"),
        (["export", "--csv", "out", "--from", "noon"], "ISO 8601"),
        (["export", "--csv", "out", "--window", "3", "--to", "9"], "together with --from or --to"),
        (["export", "--csv", "out", "--window", "nan"], "above 0"),
        (["runs", "--limit", "0"], "expected 1 or more"),
        (["prune"], "give --run ID, --older-than AGE or --max-size SIZE"),
        (["prune", "--older-than", "old"], "expected a whole number and a unit (m, h, d, w)"),
        (["prune", "--max-size", "-1"], "expected"),
        (["prune", "--run", "9"], "no run 9"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], printed: str
) -> None:
    recorded(folder / "twofold.db")
    try:
        code = main(["telemetry", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    complaint = capsys.readouterr().err
    assert code == 2
    assert printed in complaint
    assert len(complaint.splitlines()) == 1
