"""Keeps the database, including its write-ahead log, within a size by removing the oldest rows.

A busy server records tens of megabytes a minute. Details (blocks of events, steps) go first, an equal share of each
table at a time. layer_second, which sums them, is trimmed where it alone takes half of the room. Requests, load samples
and steps of training go only when nothing else is left. Totals of runs stay. `make_room` is called before each
transaction and leaves room for it, so that the file need not grow: SQLite reuses freed pages.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine

BUSY_TIMEOUT_S: Final = 1.0
"""How long one statement waits for another process; the writer retries while its queue has room."""

DETAILS: Final = ("token_layer_block", "cache_event_block", "upload_block", "step")
SUMS: Final = "layer_second"
LAST: Final = ("request", "load_sample", "training_step")

_ROW_BYTES: Final = 400
"""Upper bound for a queued event or record with its indices and its part of layer_second (measured: 60 to 250)."""
_PAGE_BYTES: Final = 4096
_SHRINK_S: Final = 0.25
"""Time per call for shrinking the file after the limit was lowered; the next call continues."""
_VACUUM_PAGES: Final = 128
_READERS_MS: Final = 100


@dataclass(frozen=True)
class Budget:
    """Shares of a limit in bytes."""

    max_bytes: int

    @property
    def log_bytes(self) -> int:
        """Share of the write-ahead log: checkpoints keep it far below, unless a reader holds an old state."""
        return min(32 * 1024**2, self.max_bytes // 5)

    @property
    def file_bytes(self) -> int:
        return self.max_bytes - self.log_bytes

    @property
    def transaction_rows(self) -> int:
        """Most rows per transaction; it takes at most a twentieth of the limit."""
        return max(64, min(16_384, self.max_bytes // (20 * _ROW_BYTES)))

    @property
    def transaction_bytes(self) -> int:
        return self.transaction_rows * _ROW_BYTES

    @property
    def checkpoint_pages(self) -> int:
        """Log length beyond which SQLite copies it into the file."""
        return max(16, min(1000, self.log_bytes // 8 // _PAGE_BYTES))


@dataclass(frozen=True)
class Room:
    """Whether another transaction fits, and what was removed for it."""

    fits: bool
    num_removed: int
    unchecked_rows: int = 0
    """Rows that fit into a part of the free room so small that their log cannot matter either."""


def prepare(engine: Engine, budget: Budget) -> None:
    """Set SQLite's own limits of the log; for a newly opened connection."""
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA wal_autocheckpoint = {budget.checkpoint_pages}")
        connection.exec_driver_sql(f"PRAGMA journal_size_limit = {budget.log_bytes // 2}")


def make_room(engine: Engine, path: Path, budget: Budget) -> Room:
    """Remove the oldest rows, free pages and empty the log until one more transaction fits.

    It does not fit if a reader holds an old state so that the log cannot be emptied, or nothing is left to remove.
    """
    until_s = time.perf_counter() + _SHRINK_S
    removed = 0
    with engine.connect() as connection:
        used, file = _sizes(connection)
        log = _emptied_log_bytes(connection, path, budget)
        wanted = budget.file_bytes - budget.transaction_bytes
        if used > wanted:
            # Somewhat more than needed, so that not every transaction has to remove rows.
            wanted -= budget.transaction_bytes
        while used > wanted and _log_fits(log, file, budget):
            if used + budget.transaction_bytes <= file and time.perf_counter() > until_s:
                break
            now_removed = _remove_oldest(connection, budget)
            if not now_removed:
                break
            removed += now_removed
            used, file = _sizes(connection)
            log = _emptied_log_bytes(connection, path, budget)
        while used < file > budget.file_bytes and log <= budget.log_bytes and time.perf_counter() < until_s:
            _vacuum(connection)
            before, (used, file) = file, _sizes(connection)
            log = _emptied_log_bytes(connection, path, budget)
            if file >= before:
                break
    fits = used + budget.transaction_bytes <= max(budget.file_bytes, file) and _log_fits(log, file, budget)
    free = min(wanted - used, budget.log_bytes - log) if file <= budget.file_bytes else 0
    return Room(fits, removed, max(0, free // (4 * _ROW_BYTES)))


def _vacuum(connection: Connection) -> None:
    """Return free pages at the file's end to the file system."""
    connection.commit()
    # Every step of this statement frees one page and returns no row. A cursor takes a single step; a script takes all.
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")


def _log_fits(log: int, file: int, budget: Budget) -> bool:
    """Whether a transaction may still be appended to the log; always true without blocking readers."""
    return log + budget.transaction_bytes <= max(budget.log_bytes, budget.max_bytes - file)


def _emptied_log_bytes(connection: Connection, path: Path, budget: Budget) -> int:
    """Bytes of the log after trying to empty a long one; waits for readers that finish soon."""
    log = _log_bytes(path)
    if log <= budget.log_bytes // 2:
        return log
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {_READERS_MS}")
    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1e3)}")
    return _log_bytes(path)


def _sizes(connection: Connection) -> tuple[int, int]:
    """Bytes of the file's pages in use, and of all pages."""
    pages, free, size = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size, pages * size


def _log_bytes(path: Path) -> int:
    try:
        return os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        return 0


def _remove_oldest(connection: Connection, budget: Budget) -> int:
    """Remove about a transaction's worth of rows in one transaction; returns how many."""
    most = budget.transaction_rows
    connection.rollback()
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    removed = 0
    if _sums_bytes(connection) <= budget.file_bytes // 2:
        removed = _remove_share(connection, DETAILS, most)
    removed = removed or _remove_share(connection, (SUMS,), most) or _remove_share(connection, LAST, most)
    connection.commit()
    return removed


def _remove_share(connection: Connection, tables: tuple[str, ...], most: int) -> int:
    """Remove the oldest rows of tables, the same share of each, about `most` events and records together."""
    ranges = {table: _row_range(connection, table) for table in tables}
    total = sum(
        (last - first) * _events_per_row(connection, table) for table, (first, last) in ranges.items()
    )
    share = min(1.0, most / max(1.0, total))
    removed = 0
    for table, (first, last) in ranges.items():
        until = first + math.ceil((last - first) * share)
        cursor = connection.exec_driver_sql(f"DELETE FROM {table} WHERE rowid < ?", (until,))  # noqa: S608
        removed += int(cursor.rowcount)
    return removed


def _events_per_row(connection: Connection, table: str) -> float:
    """Mean events of a block, from the oldest ones, which go first; 1 in other tables."""
    if not table.endswith("_block"):
        return 1.0
    mean = connection.exec_driver_sql(
        f"SELECT avg(num_events) FROM (SELECT num_events FROM {table} ORDER BY rowid LIMIT 256)"  # noqa: S608
    ).scalar_one()
    return float(mean or 1.0)


def _row_range(connection: Connection, table: str) -> tuple[int, int]:
    """First row number and the one after the last; row numbers rise with time."""
    first, last = connection.exec_driver_sql(
        f"SELECT (SELECT min(rowid) FROM {table}), (SELECT max(rowid) FROM {table})"  # noqa: S608
    ).one()
    return (0, 0) if first is None else (int(first), int(last) + 1)


def _sums_bytes(connection: Connection) -> int:
    """Size of layer_second, estimated from its latest rows."""
    first, last = _row_range(connection, SUMS)
    mean = connection.exec_driver_sql(
        f"SELECT avg(length(uses)) FROM (SELECT uses FROM {SUMS} ORDER BY rowid DESC LIMIT 256)"  # noqa: S608
    ).scalar_one()
    return int((last - first) * ((mean or 0) + 60))
