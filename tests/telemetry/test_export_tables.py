"""Parquet and CSV exports: every row of the database, with the experts unpacked."""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from twofold.api.errors import ConfigError
from twofold.telemetry import queries, schema
from twofold.telemetry.exports import export_window, tables, write_csv, write_parquet
from twofold.telemetry.sink import EVENT_DTYPES
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, synthetic_history

BLOCKS = {f"{kind}_block" for kind in EVENT_DTYPES}
TABLES = {"expert_second", "token_expert", *EVENT_DTYPES} | set(schema.metadata.tables) - BLOCKS - {"meta"}
"""All tables of the schema, its blocks as rows."""


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> queries.Database:
    url = f"sqlite:///{tmp_path_factory.mktemp('tables') / 't.db'}"
    clock = ManualClock()
    sink = open_sink(url, now=clock)
    run = synthetic_history(sink, clock, seconds=6)
    run.load_samples("test-1", 12, failures=3)
    sink.dropped("upload", 7)
    sink.close()
    db = queries.open_database(url)
    begin_s = queries.runs(db)[0].started_s
    with sqlite3.connect(db.path) as connection:
        connection.execute("DELETE FROM machine_sample")
        connection.executemany(
            "INSERT INTO machine_sample (run_id, at_s, load_1m) VALUES (1, ?, 1.0)",
            [(begin_s + second,) for second in range(6)],
        )
    return db


def sql(db: queries.Database, statement: str) -> list[Any]:
    with sqlite3.connect(db.path) as connection:
        return connection.execute(statement).fetchall()


def csv_rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def test_csv_files_hold_the_rows_of_every_table(
    db: queries.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_A_TIME", 7)
    counts = write_csv(db, export_window(db, queries.runs(db)[0]), tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == counts.keys() == TABLES
    for name in TABLES - {"expert_second"}:
        assert (
            counts[name]
            == len(csv_rows(tmp_path / f"{name}.csv"))
            == sql(db, f"SELECT count(*) FROM {name}")[0][0]
        )
    assert counts["token_layer"] > 500
    assert counts["load_sample"] == 12

    columns = "number, request_id, submitted_s, finish_reason"
    with (tmp_path / "request.csv").open(encoding="utf-8", newline="") as file:
        written = [[row[name] for name in columns.split(", ")] for row in csv.DictReader(file)]
    assert written == [[str(value) for value in row] for row in sql(db, f"SELECT {columns} FROM request")]
    with (tmp_path / "load_sample.csv").open(encoding="utf-8", newline="") as file:
        assert sorted(row["ttft_ms"] for row in csv.DictReader(file))[:3] == ["", "", ""], "NULL is empty"


def test_unpacked_experts_equal_the_view_and_the_sums(db: queries.Database, tmp_path: Path) -> None:
    write_csv(db, export_window(db, queries.runs(db)[0]), tmp_path)
    columns = "run_id, step, request, position, layer, rank, expert, placement, weight, device"
    written = sorted(map(tuple, csv_rows(tmp_path / "token_expert.csv")))
    assert written == sorted(tuple(map(str, row)) for row in sql(db, f"SELECT {columns} FROM token_expert"))
    by_second = csv_rows(tmp_path / "expert_second.csv")
    sums = sql(db, "SELECT sum(num_hits), sum(num_cpu), sum(num_fetched) FROM layer_second")[0]
    for placement, total in zip(("hit", "cpu", "fetched"), sums, strict=True):
        assert sum(int(row[5]) for row in by_second if row[4] == placement) == total > 0


def test_a_range_holds_its_seconds_alone(db: queries.Database, tmp_path: Path) -> None:
    run = queries.runs(db)[0]
    counts = write_csv(db, export_window(db, run, begin="1.995", end="3.995"), tmp_path)
    steps = [
        float(row["started_s"]) for row in csv.DictReader((tmp_path / "step.csv").open(encoding="utf-8"))
    ]
    assert len(steps) == counts["step"] == 20
    assert counts["machine_sample"] == 2
    assert run.started_s + 1.995 <= min(steps) <= max(steps) < run.started_s + 3.995
    within = f"started_s >= {run.started_s + 1.995} AND started_s < {run.started_s + 3.995}"
    first, last = sql(db, f"SELECT min(step), max(step) FROM step WHERE {within}")[0]
    inside = sql(db, f"SELECT count(*) FROM upload WHERE step BETWEEN {first} AND {last}")[0][0]
    assert counts["upload"] == inside > 0


def test_parquet_files_have_types_and_the_same_rows(db: queries.Database, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (twofold[parquet])")
    counts = write_parquet(db, export_window(db, queries.runs(db)[0]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.parquet" for name in TABLES}
    experts = parquet.read_table(tmp_path / "token_expert.parquet")
    assert experts.num_rows == counts["token_expert"] > 2000
    assert [str(field.type) for field in experts.schema] == [*["int64"] * 7, "string", "double", "int64"]
    expected = sql(db, "SELECT sum(expert), sum(weight), sum(placement = 'hit') FROM token_expert")[0]
    found = experts.to_pydict()
    assert (sum(found["expert"]), found["placement"].count("hit")) == (expected[0], expected[2])
    assert sum(found["weight"]) == pytest.approx(expected[1])
    samples = parquet.read_table(tmp_path / "load_sample.parquet").to_pydict()
    assert samples["ttft_ms"].count(None) == 3


def test_duckdb_reads_the_parquet_files(db: queries.Database, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow (twofold[parquet])")
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb")
    write_parquet(db, export_window(db, queries.runs(db)[0]), tmp_path)
    statement = "SELECT layer, expert, count(*) AS uses FROM {} GROUP BY layer, expert ORDER BY layer, expert"
    found = duckdb.sql(statement.format(f"'{tmp_path}/token_expert.parquet'")).fetchall()
    assert found == sql(db, statement.format("token_expert"))


def test_without_pyarrow_the_message_names_the_extra(
    db: queries.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"twofold\[parquet\]"):
        write_parquet(db, export_window(db, queries.runs(db)[0]), tmp_path)
    assert list(tmp_path.iterdir()) == []
