"""Deletes whole runs from a telemetry database, in one transaction."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sqlalchemy import Connection, delete, select
from sqlalchemy.exc import SQLAlchemyError

from twofold.api.errors import ConfigError
from twofold.telemetry import database, schema, stores

Progress = Callable[[int, int], None]
"""Called with (tables done, all tables) of all runs that may be deleted."""


@dataclass(frozen=True)
class PrunedRun:
    """A deleted run."""

    run_id: int
    model: str
    num_rows: int


@dataclass(frozen=True)
class Pruned:
    """What was deleted, and the bytes of the file's used pages before and after."""

    runs: list[PrunedRun]
    bytes_before: int
    bytes_after: int


def prune(
    url: str,
    *,
    run_ids: Collection[int] = (),
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    dry_run: bool = False,
    progress: Progress = lambda done, total: None,
) -> Pruned:
    """Delete the named runs, those that ended more than `older_than_s` ago, then the oldest until the file is within
    `max_bytes`.

    A dry run does the same and rolls back. ConfigError if a named run does not exist, or a server writes the file. Runs
    that engines write to PostgreSQL now are left alone.
    """
    opened = stores.open_for_writing(url)
    try:
        with opened.transaction() as connection:
            pruned = _prune(
                connection, run_ids, older_than_s=older_than_s, max_bytes=max_bytes, progress=progress
            )
            if dry_run:
                connection.rollback()
        if not dry_run and isinstance(opened, database.WritableDatabase):
            opened.shrink()
        return pruned
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise ConfigError(
            f"{opened.label} was not changed: {getattr(error, 'orig', None) or error}; make room on its disk and "
            "end programs that hold it open"
        ) from None
    finally:
        opened.close()


def _prune(
    connection: Connection,
    run_ids: Collection[int],
    *,
    older_than_s: float | None,
    max_bytes: int | None,
    progress: Progress,
) -> Pruned:
    run = schema.run.c
    runs = connection.execute(
        select(run.run_id, run.model, run.finished_s, run.last_seen_s).order_by(run.run_id)
    ).all()
    live = _runs_of_other_writers(connection)
    runs = [each for each in runs if each.run_id not in live]
    unknown = sorted(set(run_ids) - {each.run_id for each in runs})
    if unknown:
        known = f"{runs[0].run_id} to {runs[-1].run_id}" if runs else "none"
        raise ConfigError(f"the database holds no run {unknown[0]}; it has runs {known}")
    oldest_s = None if older_than_s is None else time.time() - older_than_s
    chosen = {
        each.run_id
        for each in runs
        if each.run_id in run_ids
        or (oldest_s is not None and (each.finished_s or each.last_seen_s) < oldest_s)
    }
    before = _used_bytes(connection)
    pruned: list[PrunedRun] = []
    tables = [table for table in reversed(schema.metadata.sorted_tables) if "run_id" in table.c]
    total = len(tables) * (len(chosen) if max_bytes is None else len(runs))
    # The chosen runs first, then the others, oldest first.
    for each in sorted(runs, key=lambda found: (found.run_id not in chosen, found.run_id)):
        fits = max_bytes is None or _used_bytes(connection) <= max_bytes
        if each.run_id not in chosen and fits:
            break
        num_rows = 0
        for table in tables:
            num_rows += connection.execute(delete(table).where(table.c.run_id == each.run_id)).rowcount
            progress(len(pruned) * len(tables) + tables.index(table) + 1, total)
        pruned.append(PrunedRun(each.run_id, each.model, num_rows))
    return Pruned(pruned, before, _used_bytes(connection))


def _runs_of_other_writers(connection: Connection) -> set[int]:
    """Runs that other engines write now; none for a file, which has one writer."""
    if connection.dialect.name == "sqlite":
        return set()
    from twofold.telemetry import postgres

    return postgres.written_runs(connection)


def _used_bytes(connection: Connection) -> int:
    if connection.dialect.name != "sqlite":
        from twofold.telemetry import postgres

        return postgres.stored_bytes(connection)
    pages, free, size = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size
