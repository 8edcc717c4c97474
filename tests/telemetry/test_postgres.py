"""PostgreSQL holds what SQLite would, for several engines at once, and survives the server's end."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, event, select
from twofold.api.errors import ConfigError
from twofold.telemetry import queries, schema
from twofold.telemetry.summary import summarise
from twofold.telemetry.writer import DatabaseSink, open_sink
from twofold.tools.cli.doctor.machine_checks import check_telemetry
from twofold.tools.cli.main import main

from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history
from tests.e2e.waiting import wait_until
from tests.telemetry.postgres_server import PostgresServer, running_server
from tests.telemetry.records import step_record, token_layers

pytestmark = pytest.mark.xdist_group("postgres")

_names = (f"telemetry_{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_server() as started:
        yield started


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.new_database(next(_names))


def open_writer(url: str, **options: Any) -> DatabaseSink:
    sink = open_sink(url, **options)
    assert isinstance(sink, DatabaseSink)
    return sink


def write_history(url: str, accelerator: str = "emulated:rtx4090-pcie4") -> None:
    clock = ManualClock()
    sink = open_writer(url, now=clock)
    run = synthetic_history(sink, clock, seconds=8, info=run_info(accelerator))
    run.load_samples("lt-1", 40, failures=3)
    sink.dropped("upload", 7)
    sink.close()
    assert sink.stats().num_dropped == 7


def plain(value: Any) -> Any:
    """Results as lists, dictionaries and arrays, independent of the order within a step."""
    if isinstance(value, np.ndarray) and value.dtype.names:
        return np.sort(value, order=value.dtype.names).tolist()
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _arguments(db: queries.Database, run: queries.Run) -> dict[str, Any]:
    """Arguments of every query by their names."""
    return {
        "db": db,
        "run": run,
        "number": 1,
        "loadtest_id": "lt-1",
        "kind": "token_layer",
        "span": queries.window(run),
        "step": 5,
        "steps": [3, 4, 5],
        "first": 3,
        "last": 5,
        "chosen": 4,
        "found": [run],
        "trace_id": "0" * 32,
        "hits": np.ones((run.num_layers, run.num_experts), np.int64),
    }


def _queries() -> dict[str, Any]:
    """Every query: the exported functions that take a database."""
    return {
        name: function
        for name, function in vars(queries).items()
        # The machine's state is another one for each database.
        if inspect.isfunction(function)
        and "db" in inspect.signature(function).parameters
        and function is not queries.machine_samples
    }


def answers(url: str) -> dict[str, Any]:
    """What every query returns, with the defaults of its optional arguments."""
    db = queries.open_database(url)
    run = queries.runs(db)[0]
    given = _arguments(db, run)
    found: dict[str, Any] = {}
    for name, function in _queries().items():
        needed = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        assert set(needed) <= set(given), f"queries.{name} needs {needed}: give them in _arguments"
        arguments = {key: given[key] for key in needed}
        if function is queries.copy_rows:
            arguments["steps"] = queries.step_rows(db, run, queries.window(run))
        found[name] = plain(function(**arguments))
    for kind in schema.BLOCKS:
        found[f"events {kind}"] = plain(queries.events(db, run, kind))
        view = schema.views.tables[kind].c
        columns = [column for column in view if column.name != "first_step"]
        where = view.step.between(3, 4)
        found[f"view {kind}"] = sorted(tuple(row) for row in db.rows(select(*columns).where(where)))
    history = queries.RunHistory(db, run)
    found["overview"] = plain(history.overview(queries.window(run)))
    found["placements"] = plain(history.placements(queries.window(run)))
    found["summary"] = summarise(url)
    return found


@pytest.mark.parametrize("accelerator", ["emulated:rtx4090-pcie4", "emulated:rtx4090-pcie4+rtx3060-pcie3"])
def test_every_query_has_the_same_result_as_on_sqlite(tmp_path: Path, url: str, accelerator: str) -> None:
    urls = f"sqlite:///{tmp_path / 't.db'}", url
    for each in urls:
        write_history(each, accelerator)
    expected, found = (answers(each) for each in urls)
    uses = expected["device_uses"]
    assert len(uses) == 1 + accelerator.count("+")
    assert all(each["num_uploads"] and each["num_runs"] for each in uses)
    assert expected["summary"]["hits"] > 0
    assert len(expected["view token_layer"]) > 0
    for name in expected:
        np.testing.assert_equal(found[name], expected[name], err_msg=name)


def test_check_prints_the_database_size(
    server: PostgresServer, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(url)
    main(["telemetry", "check", "--telemetry-url", url])
    printed = capsys.readouterr().out.splitlines()
    name = url.rpartition("?")[0].rpartition("/")[2]
    ((size,),) = server.sql(name, "SELECT pg_database_size(current_database())")
    assert printed[1] == f"size: {size / 1e6:,.1f} MB"
    assert size > 1e6
    assert printed[0].startswith("postgresql+psycopg://twofold@/"), "a URL is no path: its slashes stay"


def test_two_engines_write_one_database_and_are_distinguished(url: str) -> None:
    sinks = [open_writer(url) for _ in range(2)]
    for sink, host in zip(sinks, ("left", "right"), strict=True):
        sink.begin_run(run_info(host=host))
        for step in range(20):
            sink.step(step_record(step))
            sink.native_events("token_layer", token_layers(12, step=step))
        wait_until(lambda sink=sink: sink.stats().num_written == 20 * 13)
    db = queries.open_database(url)
    wait_until(lambda: {run.state() for run in queries.runs(db)} == {"live"})
    assert {run.host for run in queries.runs(db)} == {"left", "right"}
    sinks[0].close()
    assert {run.host: run.state() for run in queries.runs(db)} == {"left": "ended", "right": "live"}
    sinks[1].close()
    for run in queries.runs(db):
        assert queries.step_totals(db, run).num_steps == 20
        assert len(queries.events(db, run, "token_layer")) == 20 * 12


def test_a_run_keeps_its_lock_while_others_of_its_process_begin_and_end(
    server: PostgresServer, url: str
) -> None:
    """Looks from outside before every statement of the writer: the first run must never seem interrupted."""
    sink = open_writer(url)
    sink.begin_run(run_info(host="first"))
    db = queries.open_database(url)
    wait_until(lambda: [run.state() for run in queries.runs(db)] == ["live"])
    held: set[tuple[int, ...]] = set()
    locks = (
        "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND objid <> 0 AND database = "
        f"(SELECT oid FROM pg_database WHERE datname = '{url.rpartition('?')[0].rpartition('/')[2]}')"
    )

    def look(*_: object) -> None:
        held.add(tuple(sorted(int(run) for (run,) in server.sql("postgres", locks))))

    event.listen(Engine, "before_cursor_execute", look)
    try:
        for _ in range(3):
            other = sink.another_run()
            other.begin_run(run_info(host="other"))
            wait_until(lambda: queries.runs(db)[0].state() == "live")
            other.close()
            wait_until(lambda: queries.runs(db)[0].state() == "ended")
    finally:
        event.remove(Engine, "before_cursor_execute", look)
    sink.close()
    db.engine.dispose()
    assert held == {(1,), (1, 2), (1, 3), (1, 4)}


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_while_the_server_is_away_rows_wait(server: PostgresServer, url: str, mode: str) -> None:
    sink = open_writer(url)
    sink.begin_run(run_info())
    for step in range(50):
        sink.step(step_record(step))
    wait_until(lambda: sink.stats().num_written == 50)
    server.stop(mode)
    try:
        for step in range(50, 100):
            sink.step(step_record(step))
            sink.native_events("token_layer", token_layers(60, step=step))
        wait_until(lambda: sink.stats().last_error is not None)
        assert sink.stats().num_queued == 50 * 61
    finally:
        server.start()
    wait_until(lambda: sink.stats().num_queued == 0)
    db = queries.open_database(url)
    wait_until(lambda: queries.runs(db)[0].is_live())
    sink.close()
    assert sink.stats().num_dropped == 0
    (run,) = queries.runs(db)
    assert queries.step_totals(db, run).num_steps == 100
    assert len(queries.events(db, run, "token_layer")) == 50 * 60


@pytest.mark.parametrize("arrives", [True, False])
def test_a_commit_whose_answer_is_lost_is_neither_repeated_nor_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """The connection ends around a commit: before the server has it, or after."""
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

    sink = open_writer(url)
    sink.begin_run(run_info())
    sink.step(step_record(0))
    wait_until(lambda: sink.stats().num_written == 1)
    commit, broken = PGDialect_psycopg.do_commit, []

    def break_off(dialect: Any, connection: Any) -> None:
        if broken:
            return commit(dialect, connection)
        broken.append(True)
        if arrives:
            commit(dialect, connection)
        connection.driver_connection.close() if hasattr(
            connection, "driver_connection"
        ) else connection.close()
        return commit(dialect, connection)

    monkeypatch.setattr(PGDialect_psycopg, "do_commit", break_off)
    for step in range(1, 30):
        sink.step(step_record(step))
        sink.native_events("token_layer", token_layers(6, step=step))
    wait_until(lambda: sink.stats().num_queued == 0)
    sink.close()
    assert broken
    assert sink.stats().num_dropped == 0
    db = queries.open_database(url)
    (run,) = queries.runs(db)
    assert len(queries.events(db, run, "token_layer")) == 29 * 6
    assert queries.step_totals(db, run).num_steps == 30


def test_the_oldest_rows_go_when_the_limit_is_reached(
    server: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twofold.telemetry import postgres

    monkeypatch.setattr(postgres, "_CHECK_ROOM_S", 0.0)
    sink = open_writer(url, max_bytes=30_000)
    sink.begin_run(run_info())
    for step in range(60):
        sink.step(step_record(step))
        sink.native_events("token_layer", token_layers(300, step=step))
        if step % 6 == 5:
            wait_until(lambda: sink.stats().num_queued == 0)
    sink.close()
    db = queries.open_database(url)
    (run,) = queries.runs(db)
    steps = queries.events(db, run, "token_layer")["step"]
    assert steps.max() == 59
    assert steps.min() > 0
    assert queries.step_totals(db, run).num_steps == 60


def test_a_text_that_postgresql_cannot_store_costs_only_that_character(url: str) -> None:
    sink = open_writer(url)
    sink.begin_run(run_info(model="a\0b"))
    sink.step(step_record(0))
    sink.close()
    db = queries.open_database(url)
    assert queries.runs(db)[0].model == "a\ufffdb"
    assert sink.stats().num_dropped == 0


def test_a_newer_database_and_one_of_others_are_refused(server: PostgresServer, url: str) -> None:
    open_writer(url).close()
    name = url.split("?")[0].rsplit("/", 1)[1]
    server.sql(name, "UPDATE meta SET value = '99'")
    for open_it in (open_sink, queries.open_database):
        with pytest.raises(ConfigError, match="update Twofold"):
            open_it(url)
    other = server.new_database(next(_names))
    server.sql(other.split("?")[0].rsplit("/", 1)[1], "CREATE TABLE run (a int)")
    with pytest.raises(ConfigError, match="is not a telemetry database"):
        open_sink(other)


def test_a_missing_server_is_one_line(tmp_path: Path) -> None:
    url = f"postgresql://someone:secret@/telemetry?host={tmp_path}"
    for open_it in (open_sink, queries.open_database):
        with pytest.raises(ConfigError, match="cannot be") as error:
            open_it(url)
        assert "secret" not in str(error.value)
        assert "\n" not in str(error.value)


def test_views_show_the_same_events_as_those_of_sqlite(url: str, tmp_path: Path) -> None:
    urls = (url, f"sqlite:///{tmp_path / 't.db'}")
    for each in urls:
        clock = ManualClock()
        sink = open_writer(each, now=clock)
        synthetic_history(sink, clock, seconds=2)
        sink.close()
    for view in schema.views.tables.values():
        # Which events share a block depends on when they were written.
        columns = [c for c in view.columns if c.name not in ("run_id", "first_step", "last_step")]
        found = [
            sorted(tuple(row) for row in queries.open_database(each).rows(select(*columns))) for each in urls
        ]
        assert found[0] == found[1], view.name
        assert len(found[0]) > 50


def test_doctor_reports_the_server(url: str) -> None:
    empty = check_telemetry(url)
    assert empty is not None
    assert empty.verdict == "ok"
    assert empty.found.endswith("no tables yet")
    open_writer(url).close()
    found = check_telemetry(url)
    assert found is not None
    assert found.verdict == "ok"
    assert re.fullmatch(
        rf"PostgreSQL \d+\.\d+ at postgresql\+psycopg://\S+, [\d.]+ MB, schema version {schema.SCHEMA_VERSION}",
        found.found,
    )


def test_doctor_reports_a_server_that_does_not_answer() -> None:
    gone = check_telemetry("postgresql://writer:secret@127.0.0.1:1/none")
    assert gone is not None
    assert gone.verdict == "bad"
    assert gone.remedy
    assert "127.0.0.1:1" in gone.found
    assert "secret" not in gone.found
    assert "\n" not in gone.found
    assert check_telemetry("sqlite:///t.db") is None
