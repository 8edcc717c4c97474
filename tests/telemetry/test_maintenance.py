"""`check` finds what is wrong with a database; `prune` deletes whole runs and nothing else."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from twofold.api.errors import ConfigError
from twofold.telemetry import queries, schema
from twofold.telemetry.check import Report, check_database
from twofold.telemetry.prune import prune
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, synthetic_history

DAY_S = 86_400.0
TABLES = [table.name for table in schema.metadata.sorted_tables if "run_id" in table.c]


def three_runs(path: Path) -> str:
    """Runs of 3, 6 and 3 s that began ten, five and zero days ago."""
    url = f"sqlite:///{path / 't.db'}"
    for days, seconds in ((10, 3), (5, 6), (0, 3)):
        clock = ManualClock(time.time() - days * DAY_S - 60)
        sink = open_sink(url, now=clock)
        synthetic_history(sink, clock, seconds=seconds).load_samples(f"test-{days}", 4)
        sink.close()
    return url


def rows_of(path: Path) -> dict[int, dict[str, int]]:
    with sqlite3.connect(path / "t.db") as database:
        found: dict[int, dict[str, int]] = {}
        for table in TABLES:
            for run_id, count in database.execute(f"SELECT run_id, count(*) FROM {table} GROUP BY run_id"):
                found.setdefault(run_id, {})[table] = count
    return found


def report_of(url: str) -> Report:
    return check_database(queries.open_database(url))


def execute(path: Path, statement: str) -> None:
    with sqlite3.connect(path / "t.db") as database:
        database.execute(statement)


def test_a_sound_database_has_no_problems(tmp_path: Path) -> None:
    report = report_of(three_runs(tmp_path))
    assert report.problems == []
    assert report.num_runs == 3
    assert report.schema_version == schema.SCHEMA_VERSION
    assert report.file_bytes == (tmp_path / "t.db").stat().st_size
    for table, count in report.num_rows.items():
        assert count == sum(run.get(table, 0) for run in rows_of(tmp_path).values())


def test_check_names_each_fault(tmp_path: Path) -> None:
    url = three_runs(tmp_path)
    execute(tmp_path, "DELETE FROM step WHERE run_id = 2 AND step IN (5, 6)")
    execute(tmp_path, "INSERT INTO dropped VALUES (3, 'upload', 'queue', 1.0, 40)")
    execute(tmp_path, "INSERT INTO run_total VALUES (9, 'num_steps', 1.0)")
    assert report_of(url).problems == [
        "table run_total: 1 rows belong to no run",
        "run 2: 2 steps are missing",
        "run 3: 40 events were lost",
    ]


def test_check_finds_a_damaged_index(tmp_path: Path) -> None:
    url = three_runs(tmp_path)
    with sqlite3.connect(tmp_path / "t.db") as database:
        page, size = (
            database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'step_by_time'").fetchone()[0],
            database.execute("PRAGMA page_size").fetchone()[0],
        )
    with (tmp_path / "t.db").open("r+b") as file:
        file.seek((page - 1) * size + size - 200)
        file.write(bytes(200))
    assert any(problem.startswith("integrity: ") for problem in report_of(url).problems)


@pytest.mark.parametrize(
    ("choice", "deleted"),
    [
        ({"run_ids": [2]}, {2}),
        ({"older_than_s": 7 * DAY_S}, {1}),
        ({"older_than_s": 2 * DAY_S}, {1, 2}),
        ({"older_than_s": 7 * DAY_S, "run_ids": [3]}, {1, 3}),
        ({"older_than_s": 20 * DAY_S}, set()),
        ({"max_bytes": 10**12}, set()),
        ({"max_bytes": 1}, {1, 2, 3}),
    ],
)
def test_prune_deletes_the_chosen_runs_and_keeps_the_others_whole(
    tmp_path: Path, choice: dict[str, object], deleted: set[int]
) -> None:
    url = three_runs(tmp_path)
    before = rows_of(tmp_path)
    size = (tmp_path / "t.db").stat().st_size
    tried = prune(url, **choice, dry_run=True)
    assert rows_of(tmp_path) == before, "a dry run changes nothing"
    done = prune(url, **choice)
    assert done == tried
    assert {run.run_id: run.num_rows for run in done.runs} == {
        run_id: sum(before[run_id].values()) for run_id in sorted(deleted)
    }
    assert rows_of(tmp_path) == {run_id: rows for run_id, rows in before.items() if run_id not in deleted}
    assert ((tmp_path / "t.db").stat().st_size < size) == bool(deleted)
    assert report_of(url).problems == []


def test_prune_by_size_deletes_as_few_of_the_oldest_as_it_takes(tmp_path: Path) -> None:
    url = three_runs(tmp_path)
    whole = prune(url, max_bytes=10**12).bytes_before
    without_first = prune(url, run_ids=[1], dry_run=True).bytes_after
    assert without_first < whole
    done = prune(url, max_bytes=without_first)
    assert [run.run_id for run in done.runs] == [1]
    assert done.bytes_after == without_first


def test_an_interrupted_prune_changes_nothing(tmp_path: Path) -> None:
    url = three_runs(tmp_path)
    before = rows_of(tmp_path)

    def interrupt(done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(url, run_ids=[1, 2], progress=interrupt)
    assert rows_of(tmp_path) == before
    prune(url, run_ids=[1])  # and the lock is free


def test_prune_refuses_unknown_runs_and_files_being_written(tmp_path: Path) -> None:
    url = three_runs(tmp_path)
    with pytest.raises(ConfigError, match=r"no run 7; it has runs 1 to 3"):
        prune(url, run_ids=[7])
    sink = open_sink(url)
    try:
        with pytest.raises(ConfigError, match="being written by another process"):
            prune(url, run_ids=[1])
    finally:
        sink.close()
