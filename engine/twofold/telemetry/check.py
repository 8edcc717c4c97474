"""Checks a telemetry database: integrity, schema version, missing steps, lost events, sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import func, select, text

from twofold.telemetry import queries, schema
from twofold.telemetry.queries.runs import Database

_MOST_FAULTS: Final = 5


@dataclass(frozen=True)
class Report:
    """Results of a check."""

    path: str
    schema_version: int
    file_bytes: int
    """Size of the file, or of the PostgreSQL database with its indices."""
    log_bytes: int | None
    """Size of SQLite's write-ahead log; None on PostgreSQL, whose log serves all databases of the server."""
    num_runs: int
    num_rows: dict[str, int]
    """By table."""
    faults: list[str]
    """SQLite's integrity faults; the first few."""
    orphans: dict[str, int]
    """By table, rows of a run that is not in table `run`; only tables that have some."""
    missing_steps: dict[int, int]
    """By run, step numbers missing between its first and last step; only runs that have some."""
    lost_events: dict[int, int]
    """By run; only runs that lost some."""

    @property
    def problems(self) -> list[str]:
        """Every finding that makes figures wrong, as one line each; empty if there is none."""
        return [
            *(
                f"integrity: {fault}; copy what is needed with `export` and start a new file"
                for fault in self.faults
            ),
            *(f"table {name}: {count:,} rows belong to no run" for name, count in self.orphans.items()),
            *(f"run {run}: {count:,} steps are missing" for run, count in self.missing_steps.items()),
            *(f"run {run}: {count:,} events were lost" for run, count in self.lost_events.items()),
        ]


def _faults(db: Database) -> list[str]:
    """SQLite's findings; PostgreSQL checks its pages itself."""
    if not db.is_file:
        return []
    return [row[0] for row in db.rows(text(f"PRAGMA quick_check({_MOST_FAULTS})")) if row[0] != "ok"]


def check_database(db: Database) -> Report:
    """Read the whole file once. ConfigError if it cannot be read."""
    path = Path(db.path)
    tables = [table for table in schema.metadata.sorted_tables if "run_id" in table.c]
    rows = {table.name: int(db.rows(select(func.count()).select_from(table))[0][0]) for table in tables}
    orphans = {
        table.name: int(
            db.rows(
                select(func.count())
                .select_from(table)
                .where(table.c.run_id.not_in(select(schema.run.c.run_id)))
            )[0][0]
        )
        for table in tables
        if table is not schema.run
    }
    runs = queries.runs(db, limit=1_000_000)
    lost = {run.run_id: sum(each.num_events for each in queries.dropped(db, run)) for run in runs}
    return Report(
        path=db.path,
        schema_version=schema.SCHEMA_VERSION,
        file_bytes=_size(path) if db.is_file else _database_size(db),
        log_bytes=_size(Path(f"{path}-wal")) if db.is_file else None,
        num_runs=len(runs),
        num_rows=rows,
        faults=_faults(db),
        orphans={name: count for name, count in orphans.items() if count},
        missing_steps=_missing_steps(db),
        lost_events={run_id: count for run_id, count in sorted(lost.items()) if count},
    )


def _missing_steps(db: Database) -> dict[int, int]:
    step = schema.step.c
    spans = db.rows(
        select(step.run_id, func.max(step.step) - func.min(step.step) + 1 - func.count()).group_by(
            step.run_id
        )
    )
    return {int(run_id): int(missing) for run_id, missing in spans if missing}


def _database_size(db: Database) -> int:
    return int(db.rows(text("SELECT pg_database_size(current_database())"))[0][0])


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
