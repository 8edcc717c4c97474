"""Keeps the database within a size: the oldest details go, what sums them up stays.

A busy server records tens of megabytes a minute. Rows of token_layer, cache_event, upload and step are
removed by age, an equal share of each table at a time; requests and layer_second, a few per cent of the
whole, are kept. SQLite reuses the room; the file itself does not shrink.
"""

from __future__ import annotations

import time
from typing import Final

from sqlalchemy import Connection, Engine

DETAILS: Final = ("token_layer", "cache_event", "upload", "step")
_SHARE: Final = 0.02
_KEPT: Final = 0.95
"""Of the limit, once it was reached: so that rows are not removed at every look."""


def used_bytes(connection: Connection) -> int:
    """Of the database file, pages that are free for reuse not counted."""
    pages, free, size = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def trim(engine: Engine, max_bytes: int, *, budget_s: float = 0.5) -> int:
    """Remove the oldest details until at most 95 % of `max_bytes` are used, for no longer than `budget_s`.

    Returns the number of rows removed; what is still too much is left for the next time.
    """
    removed = 0
    begun_s = time.perf_counter()
    with engine.begin() as connection:
        if used_bytes(connection) <= max_bytes:
            return 0
    while time.perf_counter() - begun_s < budget_s:
        with engine.begin() as connection:
            now_removed = sum(_remove_oldest(connection, table) for table in DETAILS)
            removed += now_removed
            if not now_removed or used_bytes(connection) <= _KEPT * max_bytes:
                break
    return removed


def _remove_oldest(connection: Connection, table: str) -> int:
    first, last = connection.exec_driver_sql(f"SELECT min(rowid), max(rowid) FROM {table}").one()  # noqa: S608
    if first is None:
        return 0
    until = first + max(1, int((last - first) * _SHARE))
    cursor = connection.exec_driver_sql(f"DELETE FROM {table} WHERE rowid < ?", (until,))  # noqa: S608
    return int(cursor.rowcount)
