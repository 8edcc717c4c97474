"""Opens the database of a telemetry URL: a SQLite file (`database`) or PostgreSQL (`postgres`)."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection

from twofold.telemetry import database, schema
from twofold.telemetry.retention import Budget, Room


class Store(Protocol):
    """A database opened for writing. Only the writer's thread calls it."""

    confirms_commits: bool

    @property
    def label(self) -> str:
        """The file or the URL, without a password."""

    def transaction(self) -> AbstractContextManager[Connection]: ...
    def prepare(self, budget: Budget) -> None: ...
    def make_room(self, budget: Budget) -> Room: ...
    def is_transient(self, error: Exception) -> bool: ...
    def record_runs(self, run_ids: Set[int]) -> None: ...
    def is_gone(self) -> bool: ...
    def close_gone(self) -> None: ...
    def close(self) -> None: ...


def open_for_writing(url: str) -> Store:
    """Open the database with its tables, made or upgraded if need be. ConfigError, with the remedy, if it cannot be
    written."""
    parsed = schema.parse_url(url)
    if parsed.get_backend_name() == "postgresql":
        from twofold.telemetry import postgres

        return postgres.open_for_writing(parsed)
    return database.open_for_writing(Path(parsed.database or ""))


def make_private(url: str) -> None:
    """Let only this user read the files of a SQLite database, which holds prompts and answers from now on."""
    parsed = schema.parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{parsed.database}{suffix}").chmod(0o600)


def upgrade(url: str) -> int:
    """Upgrade a database to this Twofold's schema version, which is returned. ConfigError if there is none."""
    parsed = schema.parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        database.check_presence(Path(parsed.database or ""))
    open_for_writing(url).close()
    return schema.SCHEMA_VERSION
