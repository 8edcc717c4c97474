"""Opens a telemetry database; lists its runs, and windows of them."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import Engine, Executable, select
from sqlalchemy.exc import SQLAlchemyError

from twofold.api.errors import ConfigError
from twofold.api.types import ControlRecord, RunInfo
from twofold.telemetry import database, schema
from twofold.telemetry.sink import LEVELS, TelemetryLevel
from twofold.telemetry.totals import NUM_TRANSACTIONS

LIVE_AFTER_S: Final = 5.0
"""A run whose heartbeat (each second) is older than this is not live, where its lock cannot decide."""

_STAMP_S: Final = 2.0
"""How long a result of a database without a file counts as current."""

_shared = threading.local()
"""Connections by path, of the blocks `one_connection` that this thread is in."""

RunState = Literal["live", "ended", "interrupted"]
"""The last state means that the run was interrupted (crash, kill, power loss)."""


@dataclass(frozen=True)
class Database:
    """A telemetry database opened for reading."""

    path: str
    """Its file, or its URL without the password; for display."""
    engine: Engine

    @property
    def is_file(self) -> bool:
        """Whether it is a SQLite file."""
        return self.engine.dialect.name == "sqlite"

    def written_runs(self) -> set[int] | None:
        """Runs that a process is writing now; None if unknown."""
        if self.is_file:
            return database.written_runs(Path(self.path))
        from twofold.telemetry import postgres

        with contextlib.suppress(SQLAlchemyError), self.engine.connect() as connection:
            return postgres.written_runs(connection)
        return None

    def identity(self) -> object:
        """Changes when the file is replaced by another."""
        with contextlib.suppress(OSError):
            return os.stat(self.path).st_ino if self.is_file else None
        return None

    def stamp(self) -> tuple[object, ...]:
        """Changes when something was written, and perhaps at other times."""
        if not self.is_file:
            return (time.time() // _STAMP_S,)
        stamps: list[object] = []
        for name in (self.path, f"{self.path}-wal"):
            with contextlib.suppress(OSError):
                status = os.stat(name)
                stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(stamps)

    def rows(self, query: Executable) -> list[Any]:
        """All rows; ConfigError if the file was deleted or replaced by something else."""
        try:
            if (shared := vars(_shared).get(self.path)) is not None:
                return list(shared.execute(query))
            with self.engine.connect() as connection:
                return list(connection.execute(query))
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise self._unreadable(error) from None

    @contextlib.contextmanager
    def one_connection(self) -> Iterator[None]:
        """This thread's queries of the database share a connection within the block: opening one takes 2 to 3 ms."""
        if self.path in vars(_shared):
            yield
            return
        try:
            connection = self.engine.connect()
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise self._unreadable(error) from None
        with connection:
            vars(_shared)[self.path] = connection
            try:
                yield
            finally:
                del vars(_shared)[self.path]

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"telemetry database {self.path} cannot be read: {getattr(error, 'orig', None) or error}; "
            "is the server still writing this file, and is it of this version?"
        )


def open_database(url: str) -> Database:
    """Open a database. ConfigError, with the remedy, if the URL is bad, there is no database, or its schema differs."""
    parsed = schema.parse_url(url)
    if parsed.get_backend_name() == "postgresql":
        from twofold.telemetry import postgres

        return Database(postgres.label_of(parsed), postgres.open_for_reading(parsed))
    path = Path(parsed.database or "")
    return Database(str(path), database.open_for_reading(path))


@dataclass(frozen=True, kw_only=True)
class Run(RunInfo):
    """One process lifetime as the engine recorded it."""

    run_id: int
    started_s: float
    last_seen_s: float
    finished_s: float | None
    emulated: bool
    telemetry_level: TelemetryLevel
    is_written: bool | None = None
    """Whether a process has locked the database to write this run; None if unknown."""

    @property
    def has_slots(self) -> bool:
        """Whether there is an expert cache: without one there is no hit rate and no policy."""
        return self.num_slots > 0

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices with expert slots, first device first; empty without slots."""
        return tuple(self.accelerator.removeprefix("emulated:").split("+")) if self.has_slots else ()

    def is_live(self, now_s: float | None = None) -> bool:
        """Whether the run is live, by the writer's lock, else by its last heartbeat."""
        if self.finished_s is not None or self.is_written is not None:
            return self.finished_s is None and self.is_written is True
        now = time.time() if now_s is None else now_s
        return now - self.last_seen_s <= LIVE_AFTER_S

    def state(self, now_s: float | None = None) -> RunState:
        if self.is_live(now_s):
            return "live"
        return "interrupted" if self.finished_s is None else "ended"


def runs(db: Database, *, limit: int = 100) -> list[Run]:
    """Runs, newest first."""
    rows = db.rows(select(schema.run).order_by(schema.run.c.run_id.desc()).limit(limit))
    written = db.written_runs()
    return [_run(row, None if written is None else row.run_id in written) for row in rows]


def find_run(db: Database, run_id: int | None = None) -> Run:
    """The run of that number, the last one by default. ConfigError if there is none."""
    found = runs(db, limit=1_000_000)
    if not found:
        raise ConfigError(
            f"telemetry database {db.path} holds no run yet; start a server with --telemetry-url first"
        )
    if run_id is None:
        return found[0]
    for run in found:
        if run.run_id == run_id:
            return run
    raise ConfigError(
        f"telemetry database {db.path} holds no run {run_id}; it has runs {found[-1].run_id} to {found[0].run_id}"
    )


def level_of(run: Run) -> TelemetryLevel:
    """How much was recorded of the run (`--telemetry`)."""
    return run.telemetry_level


def needs_level(run: Run, level: TelemetryLevel) -> str | None:
    """A sentence that names the level to record at, if the run lacks what `level` has; None if it has it."""
    if LEVELS.index(level_of(run)) >= LEVELS.index(level):
        return None
    return (
        f"Not recorded: this run used --telemetry {level_of(run)}. Start the server with --telemetry {level} to "
        "record it."
    )


def _run(row: Any, is_written: bool | None) -> Run:
    values = dict(row._mapping)
    values["emulated"] = bool(values["emulated"])
    return Run(**values, is_written=is_written)


def run_totals(db: Database, run: Run) -> Mapping[str, float]:
    """Sums over the whole run by the names of `telemetry.totals`, 0 where nothing was counted."""
    table = schema.run_total.c
    own = table.run_id == run.run_id, table.name != NUM_TRANSACTIONS
    rows = db.rows(select(table.name, table.amount).where(*own))
    return defaultdict(float, {row.name: row.amount for row in rows})


@dataclass(frozen=True)
class Window:
    """A time range of a run in whole Unix seconds: start included, end excluded."""

    begin_s: int
    end_s: int


def window(run: Run, last_s: float | None = None, *, now_s: float | None = None) -> Window:
    """The last `last_s` seconds of a run (all of it if None), up to now while it is live, else to its end.

    Ends before the second still being written, so that no rate covers half a second.
    """
    now = time.time() if now_s is None else now_s
    if run.is_live(now):
        end_s = int(now)
    else:
        end_s = int(run.finished_s or run.last_seen_s) + 1
    begin_s = int(run.started_s)
    if last_s is not None:
        begin_s = max(begin_s, end_s - int(last_s))
    return Window(begin_s, max(end_s, begin_s + 1))


@dataclass(frozen=True)
class Dropped:
    """Lost events: `place` is "ring", "queue" or "database"."""

    kind: str
    place: str
    num_events: int


def dropped(db: Database, run: Run) -> list[Dropped]:
    table = schema.dropped.c
    query = (
        select(table.kind, table.place, table.num_events)
        .where(table.run_id == run.run_id)
        .order_by(table.kind, table.place)
    )
    return [Dropped(kind, place, int(count)) for kind, place, count in db.rows(query)]


def control_events(db: Database, run: Run, *, limit: int = 20) -> list[ControlRecord]:
    """Changes, newest first."""
    table = schema.control.c
    query = (
        select(*(column for column in table if column is not table.run_id))
        .where(table.run_id == run.run_id)
        .order_by(table.at_s.desc())
        .limit(limit)
    )
    return [ControlRecord(**row._mapping) for row in db.rows(query)]
