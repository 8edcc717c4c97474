"""Upgrades an older SQLite file in place, after an atomic copy beside it.

The upgrade is one transaction. A crash leaves the old file, with or without its copy, or the upgraded one.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from twofold.api.errors import ConfigError
from twofold.telemetry import migrations, views

_log = logging.getLogger("twofold.telemetry")

_COPIED_PAGES: Final = 4096
_REPORT_EVERY_S: Final = 2.0
_MARGIN_BYTES: Final = 16 * 1024**2


def upgrade_file(connection: Connection, path: Path, found: int) -> Path:
    """Copy the file of version `found` to the returned path and upgrade it. The caller holds the file's lock."""
    _check_space(path)
    copy = path.with_name(f"{path.name}.v{found}.bak")
    _log.info(
        "upgrading telemetry database %s from schema version %d to %d; the old file is kept as %s",
        path,
        found,
        migrations.NEWEST,
        copy.name,
    )
    _copy(connection, copy)
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    views.drop_views(connection)
    migrations.upgrade(connection, found)
    connection.commit()
    _log.info("telemetry database %s has schema version %d now", path, migrations.NEWEST)
    return copy


def _check_space(path: Path) -> None:
    """The copy takes as much as the file, and so may the log of the transaction."""
    needed = 2 * path.stat().st_size + _MARGIN_BYTES
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise ConfigError(
            f"telemetry database {path} has an older schema version, and its upgrade needs {needed / 1e6:,.0f} MB "
            f"beside it, of which {free / 1e6:,.0f} MB are free; free some, move the file to a larger disk, or choose "
            "another with --telemetry-url"
        )


def _copy(connection: Connection, copy: Path) -> None:
    """Write the whole database to `copy`, atomically; a copy that an interrupted upgrade left is replaced."""
    source = connection.connection.driver_connection
    assert isinstance(source, sqlite3.Connection)
    part = copy.with_name(f"{copy.name}.part")
    part.unlink(missing_ok=True)
    try:
        target = sqlite3.connect(part)
        try:
            source.backup(target, pages=_COPIED_PAGES, progress=_reporter(copy))
        finally:
            target.close()
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(copy)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _reporter(copy: Path) -> Callable[[int, int, int], object]:
    """Logs the copy's progress every few seconds."""
    due_s = time.monotonic() + _REPORT_EVERY_S

    def report(_status: int, remaining: int, total: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _REPORT_EVERY_S
            _log.info("copying to %s: %d %%", copy.name, 100 * (total - remaining) // max(total, 1))

    return report
