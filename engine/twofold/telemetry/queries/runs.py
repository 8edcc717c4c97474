"""Opens a telemetry database; lists its runs, and windows of them."""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import Engine, Executable, select
from sqlalchemy.exc import SQLAlchemyError

from twofold.api.errors import ConfigError
from twofold.api.types import ControlRecord, RunInfo
from twofold.telemetry import database, schema

LIVE_AFTER_S: Final = 5.0
"""A run whose heartbeat (each second) is older than this is not live, where its lock cannot decide."""

RunState = Literal["live", "ended", "interrupted"]
"""The last state means that the run was interrupted (crash, kill, power loss)."""


@dataclass(frozen=True)
class Database:
    """A telemetry database opened for reading."""

    path: str
    engine: Engine

    def rows(self, query: Executable) -> list[Any]:
        """All rows; ConfigError if the file was deleted or replaced by something else."""
        try:
            with self.engine.connect() as connection:
                return list(connection.execute(query))
        except (SQLAlchemyError, sqlite3.Error) as error:
            cause = getattr(error, "orig", None) or error
            raise ConfigError(
                f"telemetry database {self.path} cannot be read: {cause}; "
                "is the server still writing this file, and is it of this version?"
            ) from None


def open_database(url: str) -> Database:
    """Open a database. ConfigError, with the remedy, if the URL is bad, there is no database, or its schema differs."""
    path = schema.database_path(url)
    return Database(str(path), database.open_for_reading(path))


@dataclass(frozen=True, kw_only=True)
class Run(RunInfo):
    """One process lifetime as the engine recorded it."""

    run_id: int
    started_s: float
    last_seen_s: float
    finished_s: float | None
    emulated: bool
    is_written: bool | None = None
    """Whether a process has locked the database to write this run; None if unknown."""

    @property
    def has_slots(self) -> bool:
        """Whether there is an expert cache: without one there is no hit rate and no policy."""
        return self.num_slots > 0

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
    written = database.written_run(Path(db.path))
    return [_run(row, None if written is None else row.run_id == written) for row in rows]


def _run(row: Any, is_written: bool | None) -> Run:
    values = dict(row._mapping)
    values["emulated"] = bool(values["emulated"])
    return Run(**values, is_written=is_written)


def run_totals(db: Database, run: Run) -> Mapping[str, float]:
    """Sums over the whole run by the names of `telemetry.totals`, 0 where nothing was counted."""
    table = schema.run_total.c
    rows = db.rows(select(table.name, table.amount).where(table.run_id == run.run_id))
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
