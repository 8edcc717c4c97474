"""Files of every published schema version, written by the software of that version, are upgraded in place."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Integer, MetaData, create_engine, text
from twofold.api.errors import ConfigError
from twofold.telemetry import database, migrations, queries, schema, upgrade
from twofold.telemetry.sink import EVENT_DTYPES
from twofold.telemetry.summary import summarise

from scripts import telemetry_migration
from tests.dashboard.synthetic_run import run_info
from tests.telemetry.old_files import VERSIONS, old_file
from tests.telemetry.records import open_writer, scalar, step_record, url_of


def contents(path: Path) -> str:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return "\n".join(connection.iterdump())
    finally:
        connection.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_file_is_written_and_read_after_an_upgrade(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    path = old_file(tmp_path / "t.db", version)
    before = contents(path)
    with caplog.at_level(logging.INFO, "twofold.telemetry"):
        sink = open_writer(path)
    assert f"from schema version {version} to {schema.SCHEMA_VERSION}" in caplog.text
    sink.begin_run(run_info(host="here"))
    sink.step(step_record(0))
    sink.close()
    assert contents(path.with_name(f"t.db.v{version}.bak")) == before
    db = queries.open_database(url_of(path))
    new, old = queries.runs(db)
    assert (old.host, new.host) == ("", "here")
    summary = summarise(url_of(path), run_id=old.run_id)
    assert (summary["requests"]["finished"], summary["steps"]) == (1, 25)
    assert (summary["hits"], summary["cpu_misses"], summary["uploads"]) == (350, 218, 159)
    requests = queries.requests(db, old)
    tokens = queries.request_tokens(db, old, requests[0].number)
    assert tokens.experts.shape[:2] == (32, 6)
    assert (tokens.num_by_placement.sum(axis=2) == old.top_k).all()


@pytest.mark.parametrize("kind", EVENT_DTYPES)
def test_an_upgrade_keeps_every_event(tmp_path: Path, kind: str) -> None:
    path = old_file(tmp_path / "t.db", 4)
    open_writer(path).close()
    db = queries.open_database(url_of(path))
    events = queries.events(db, queries.runs(db)[0], kind)
    old = sqlite3.connect(path.with_name("t.db.v4.bak"))
    old.row_factory = sqlite3.Row
    by_request = "request," if kind == "token_layer" else ""
    rows = old.execute(f"SELECT * FROM {kind} ORDER BY {by_request} rowid").fetchall()
    old.close()
    assert len(events) == len(rows) > 100
    for event, row in zip(events, rows, strict=True):
        for name in event.dtype.names:
            if name not in row.keys():  # noqa: SIM118  newer than the file: 0
                assert not event[name].any()
            elif isinstance(row[name], bytes):
                assert event[name].tobytes().startswith(row[name])
                assert not any(event[name].tobytes()[len(row[name]) :])
            else:
                assert event[name] == row[name]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_upgraded_file_has_the_tables_of_the_schema(tmp_path: Path, version: int) -> None:
    """Fails if a column was added, changed or removed without a revision: python -m scripts.telemetry_migration."""
    path = old_file(tmp_path / "t.db", version)
    open_writer(path).close()
    with create_engine(f"sqlite:///{path}").connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []


def test_the_oldest_file_is_of_the_oldest_version() -> None:
    assert min(VERSIONS) == migrations.OLDEST


def test_a_column_without_a_revision_is_detected(tmp_path: Path) -> None:
    path = old_file(tmp_path / "t.db", migrations.OLDEST)
    open_writer(path).close()
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE run DROP COLUMN host")
    connection.close()
    with create_engine(f"sqlite:///{path}").connect() as other:
        (found,) = compare_metadata(MigrationContext.configure(other), schema.metadata)
    assert found[0] == "add_column"


def test_a_reader_of_an_old_file_is_given_the_command_that_upgrades_it(tmp_path: Path) -> None:
    path = old_file(tmp_path / "t.db", 3)
    before = contents(path)
    with pytest.raises(ConfigError) as error:
        queries.open_database(url_of(path))
    assert f"twofold telemetry upgrade --telemetry-url {url_of(path)}" in str(error.value)
    assert contents(path) == before


@pytest.mark.parametrize(
    ("stored", "message"),
    [("99", "update Twofold"), ("2", "version 3 and later"), ("x", "is not a telemetry")],
)
def test_an_unknown_version_is_refused_and_left_alone(tmp_path: Path, stored: str, message: str) -> None:
    path = old_file(tmp_path / "t.db", 3)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE meta SET value = ?", (stored,))
    connection.commit()
    connection.close()
    before = contents(path)
    for open_it in (open_writer, lambda file: queries.open_database(url_of(file))):
        with pytest.raises(ConfigError, match=message) as error:
            open_it(path)
        assert "\n" not in str(error.value)
    assert contents(path) == before
    assert not list(tmp_path.glob("*.bak*"))


def test_without_room_for_the_copy_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_file(tmp_path / "t.db", 3)
    before = contents(path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ConfigError, match=r"needs \d+ MB beside it, of which 0 MB are free"):
        open_writer(path)
    assert contents(path) == before
    assert not list(tmp_path.glob("*.bak*"))


def test_an_upgrade_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old_file(tmp_path / "t.db", 3)
    before = contents(path)
    whole = migrations.upgrade

    def then_fail(connection: object, found: int) -> None:
        whole(connection, found)  # type: ignore[arg-type]
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(upgrade.migrations, "upgrade", then_fail)
    with pytest.raises(ConfigError, match="disk I/O error"):
        open_writer(path)
    assert contents(path) == before
    monkeypatch.undo()
    open_writer(path).close()
    assert scalar(path, "SELECT value FROM meta") == str(schema.SCHEMA_VERSION)


_KILLED = """
import os, signal, sys
from pathlib import Path
from twofold.telemetry import database, migrations, upgrade
copy, apply = upgrade._copy, migrations.upgrade
def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def apply_and_die(connection, found):
    apply(connection, found)
    connection.exec_driver_sql("PRAGMA cache_spill = ON")
    killed()
def copy_and_die(*given):
    copy(*given)
    killed()
def half_a_copy(connection, to):
    to.with_name(to.name + ".part").write_bytes(b"SQLite format 3")
    killed()
if sys.argv[2] == "part":
    upgrade._copy = half_a_copy
elif sys.argv[2] == "copied":
    upgrade._copy = copy_and_die
else:
    migrations.upgrade = apply_and_die
database.open_for_writing(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", ["part", "copied", "applied"])
def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    path = old_file(tmp_path / "t.db", 3)
    before = contents(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    died = subprocess.run(
        [sys.executable, "-c", _KILLED, str(path), moment], env=environment, timeout=60, check=False
    )
    assert died.returncode == -signal.SIGKILL
    assert contents(path) == before
    database.open_for_writing(path).close()
    assert scalar(path, "SELECT value FROM meta") == str(schema.SCHEMA_VERSION)
    assert contents(path.with_name("t.db.v3.bak")) == before
    assert not list(tmp_path.glob("*.part"))


def test_the_draft_of_a_revision_is_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert telemetry_migration.draft("Nothing") is None
    changed = MetaData()
    for table in schema.metadata.tables.values():
        table.to_metadata(changed)
    changed.tables["step"].append_column(Column("num_new", Integer, nullable=False, server_default=text("0")))
    monkeypatch.setattr(schema, "metadata", changed)
    drafted = telemetry_migration.draft("Column step.num_new")
    assert drafted is not None
    revision: dict[str, object] = {}
    exec(drafted, revision)  # the draft is Python
    assert revision["down_revision"] == str(migrations.NEWEST)
    path = old_file(tmp_path / "t.db", 3)
    with create_engine(f"sqlite:///{path}").begin() as connection:
        migrations.upgrade(connection, 3)
        with Operations.context(MigrationContext.configure(connection)):
            revision["upgrade"]()  # type: ignore[operator]
        assert connection.exec_driver_sql("SELECT DISTINCT num_new FROM step").all() == [(0,)]
