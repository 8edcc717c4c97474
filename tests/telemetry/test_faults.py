"""Database faults during writes: locked, deleted, disk full, reached by other names."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from twofold.api.errors import ConfigError
from twofold.telemetry import queries
from twofold.telemetry.summary import format_summary, summarise
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import run_info
from tests.e2e.waiting import killed_at_end, wait_until
from tests.telemetry.records import (
    open_writer,
    scalar,
    step_record,
    token_layers,
    url_of,
)


def hold(path: Path) -> sqlite3.Connection:
    """Locks the database against writes, as another program would."""
    other = sqlite3.connect(path, timeout=10, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def test_while_another_program_holds_the_database_rows_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(run_info())
    wait_until(lambda: scalar(path, "SELECT count(*) FROM run") == 1)
    other = hold(path)
    with caplog.at_level(logging.WARNING, "twofold.telemetry"):
        for step in range(300):
            sink.step(step_record(step))
            sink.native_events("token_layer", token_layers(60, step=step))
        wait_until(lambda: sink.stats().last_error is not None)
        assert "locked" in (sink.stats().last_error or "")
        assert sink.stats().num_queued == 300 * 61
        other.execute("COMMIT")
        other.close()
        sink.close()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert sink.stats().num_dropped == sink.stats().num_queued == 0
    assert scalar(path, "SELECT count(*) FROM token_layer") == 300 * 60
    assert scalar(path, "SELECT group_concat(step) FROM step") == ",".join(map(str, range(300)))
    assert scalar(path, "SELECT sum(num_rows) FROM layer_second") == 300 * 60


def test_what_the_queue_cannot_hold_meanwhile_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path, max_queued_rows=1000)
    sink.begin_run(run_info())
    wait_until(lambda: scalar(path, "SELECT count(*) FROM run") == 1)
    other = hold(path)
    for step in range(3):
        sink.native_events("token_layer", token_layers(600, step=step))
    other.close()
    sink.close()
    assert sink.stats().dropped == {"ring": 0, "queue": 800, "database": 0}
    assert scalar(path, "SELECT count(*) FROM token_layer") == 1000


def delete(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def delete_the_file_alone(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """Replaces the database by an older copy, as restoring a backup does."""
    open_writer(path.with_name("backup.db")).close()
    shutil.move(path.with_name("backup.db"), path)


@pytest.mark.parametrize("remove", [delete, delete_the_file_alone, replace])
def test_a_deleted_database_is_detected_and_recreated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, remove: object
) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(run_info())
    sink.dropped("upload", 5)
    for step in range(3):
        sink.step(step_record(step))
    wait_until(lambda: sink.stats().num_written == 3)
    with caplog.at_level(logging.WARNING, "twofold.telemetry"):
        remove(path)  # type: ignore[operator]
        sink.step(step_record(3))
        wait_until(lambda: sink.stats().num_written == 4)
        sink.step(step_record(4))
        sink.close()
    (printed,) = caplog.records
    assert "was deleted or replaced" in printed.getMessage()
    assert "its 3 events" in printed.getMessage()
    assert sink.stats().dropped == {"ring": 5, "queue": 0, "database": 3}
    assert scalar(path, "SELECT group_concat(step) FROM step") == "3,4"
    db = queries.open_database(url_of(path))
    (run,) = queries.runs(db)
    assert run.finished_s is not None
    assert queries.dropped(db, run) == [
        queries.Dropped("step", "database", 3),
        queries.Dropped("upload", "ring", 5),
    ]
    assert scalar(path, "PRAGMA integrity_check") == "ok"


def test_a_database_without_a_place_waits_for_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "t.db"
    path.parent.mkdir()
    sink = open_writer(path)
    sink.begin_run(run_info())
    sink.step(step_record(0))
    wait_until(lambda: sink.stats().num_written == 1)
    shutil.rmtree(path.parent)
    sink.step(step_record(1))
    wait_until(lambda: "does not exist" in (sink.stats().last_error or ""))
    path.parent.mkdir()
    sink.close()
    assert sink.stats().dropped == {"ring": 0, "queue": 0, "database": 1}
    assert scalar(path, "SELECT group_concat(step) FROM step") == "1"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_another_path_of_a_file_has_the_same_lock(tmp_path: Path, link: object) -> None:
    path, other = tmp_path / "t.db", tmp_path / "folder" / "other.db"
    other.parent.mkdir()
    sink = open_writer(path)
    link(path, other)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"being written by another process|2 names \(hard links\)"):
        open_sink(url_of(other))
    sink.close()


def test_a_link_to_nothing_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "t.db")
    open_writer(tmp_path / "link.db").close()
    assert scalar(tmp_path / "t.db", "SELECT count(*) FROM run") == 0
    assert not (tmp_path / "link.db.lock").exists()


_PROGRAM = """
import sys, time
from twofold.telemetry.writer import open_sink
from tests.dashboard.synthetic_run import run_info
from tests.telemetry.records import step_record
sink = open_sink(sys.argv[1])
sink.begin_run(run_info())
sink.step(step_record(0))
while sink.stats().num_written < 1:
    time.sleep(0.01)
print("written", flush=True)
time.sleep(600)
"""


def test_a_killed_run_is_not_live_and_is_called_what_it_is(tmp_path: Path) -> None:
    """From the moment of its death, and whichever process opens the file next."""
    path = tmp_path / "t.db"
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, url_of(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    with killed_at_end(child):
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        assert summarise(url_of(path))["live"]
    summary = summarise(url_of(path))
    assert (summary["live"], summary["state"]) == (False, "interrupted")
    assert "interrupted (crash or kill)" in format_summary(summary)
    sink = open_writer(path)  # a server that still loads its model, so has no run of its own yet
    assert summarise(url_of(path))["state"] == "interrupted"
    sink.begin_run(run_info())
    wait_until(lambda: scalar(path, "SELECT count(*) FROM run") == 2)
    wait_until(lambda: summarise(url_of(path))["state"] == "live")
    assert summarise(url_of(path), run_id=1)["state"] == "interrupted"
    sink.close()
    assert summarise(url_of(path))["state"] == "ended"


def test_a_live_run_that_cannot_be_written_stays_live(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path, now=lambda: 1_700_000_000.0)
    sink.begin_run(run_info())
    wait_until(lambda: scalar(path, "SELECT count(*) FROM run") == 1)
    db = queries.open_database(url_of(path))
    wait_until(lambda: queries.runs(db)[0].is_live(time.time()))
    sink.close()


def test_the_first_of_two_runs_ends_when_the_second_begins(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    for model in ("first", "second"):
        sink.begin_run(run_info(model=model))
    sink.close()
    db = queries.open_database(url_of(path))
    assert [run.state() for run in queries.runs(db)] == ["ended", "ended"]
