"""Opens the SQLite file: one connection for writing, any number for reading."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from twofold.api.errors import ConfigError
from twofold.telemetry import retention, schema, views
from twofold.telemetry.retention import BUSY_TIMEOUT_S, Budget, Room
from twofold.telemetry.upgrade import upgrade_file

_TRANSIENT: Final = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}
"""Errors of the environment, not of the rows."""
_LOCK_TRIES: Final = 20
_LOCK_PAUSE_S: Final = 0.01
"""Pause between lock attempts: a reader that checks for a writer holds the lock for microseconds."""


@dataclass
class WritableDatabase:
    """The only writing connection, and the lock that keeps it the only one."""

    path: Path
    """The file itself, with symbolic links resolved."""
    engine: Engine
    lock_file: TextIO
    identity: tuple[int, int]
    """(device, inode) of the opened file."""
    confirms_commits: bool = False
    """A commit that fails has written nothing."""
    log_identity: tuple[int, int] | None = None
    """(device, inode) of its write-ahead log when last checked."""

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction that has locked the database, so that a locked one is detected before rows are converted."""
        with self.engine.begin() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def prepare(self, budget: Budget) -> None:
        """Keep the log within the budget from now on."""
        retention.prepare(self.engine, budget)

    def make_room(self, budget: Budget) -> Room:
        """Remove the oldest rows until another transaction fits."""
        return retention.make_room(self.engine, self.path, budget)

    def shrink(self) -> None:
        """Give the pages of deleted rows back to the file system."""
        with self.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            # Every step of this statement frees one page, and only a script is stepped to its end.
            driver.executescript("PRAGMA incremental_vacuum")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            connection.commit()

    def is_transient(self, error: Exception) -> bool:
        """Whether another attempt may succeed: an error of the environment, not of the rows."""
        code = getattr(getattr(error, "orig", None) or error, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in _TRANSIENT

    def is_gone(self) -> bool:
        """Whether the file was deleted or replaced, so that nothing written to it can be read any more."""
        if _identity(self.path) != self.identity:
            return True
        self.log_identity = _identity(Path(f"{self.path}-wal"))
        return False

    def close_gone(self) -> None:
        """Close the database and remove the log of its lost file: SQLite would take it for that of the new file."""
        self.close()
        log = Path(f"{self.path}-wal")
        if self.log_identity is not None and _identity(log) == self.log_identity:
            for left in (log, Path(f"{self.path}-shm")):
                left.unlink(missing_ok=True)

    @property
    def label(self) -> str:
        return str(self.path)

    def record_runs(self, run_ids: Set[int]) -> None:
        """Store which runs are being written, for `written_runs`."""
        with contextlib.suppress(OSError):  # a full disk
            self.lock_file.truncate(0)
            self.lock_file.write(" ".join(map(str, sorted(run_ids))))
            self.lock_file.flush()

    def close(self) -> None:
        self.engine.dispose()
        self.lock_file.close()


def open_for_writing(path: Path) -> WritableDatabase:
    """Open the file with its tables; create it if missing.

    The lock is `FILE.lock`, held until closed: two connections that write or checkpoint at once may damage a WAL
    database on SQLite 3.7.0 to 3.51.2. Symbolic links lead to one lock; a file with several names (hard links) is
    refused, because SQLite looks for its journal beside the name it was given. Raises ConfigError with the remedy.
    """
    path = path.resolve()
    if not path.parent.is_dir():
        raise ConfigError(
            f"telemetry database {path}: directory {path.parent} does not exist; "
            f"create it (mkdir -p {path.parent}) or choose another file with --telemetry-url"
        )
    if path.is_dir():
        raise ConfigError(f"telemetry database {path} is a directory; give a file with --telemetry-url")
    for place in (path, path.parent):
        # Judged by its mode alone, because the superuser could write it all the same.
        if place.exists() and not place.stat().st_mode & 0o222:
            raise _unwritable(path, PermissionError(f"{place} is read-only"))
    if path.exists() and (num_names := path.stat().st_nlink) > 1:
        raise ConfigError(
            f"telemetry database {path} has {num_names} names (hard links), under which several servers could write "
            "it and damage it; remove the others, copy the file (cp), or choose another with --telemetry-url"
        )
    lock_file = _lock(path)
    try:
        engine = _create(path)
        identity = _identity(path)
        assert identity is not None
        opened = WritableDatabase(path, engine, lock_file, identity)
        opened.record_runs(set())
        return opened
    except BaseException:
        lock_file.close()
        raise


def written_runs(path: Path) -> set[int] | None:
    """The runs that a process is writing now; None if unknown."""
    try:
        with open(f"{path.resolve()}.lock", encoding="ascii") as lock_file:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return set(map(int, lock_file.read().split()))
            return set()
    except (OSError, ValueError):  # no lock file, or no permission to read it
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_presence(path: Path) -> None:
    """ConfigError if there is no such file."""
    if not path.is_file():
        raise ConfigError(
            f"telemetry database {path} does not exist; start a server with --telemetry-url first"
        )


def open_for_reading(path: Path) -> Engine:
    """Read-only connections, each opened when used. ConfigError when there is nothing to read."""
    check_presence(path)
    engine = create_engine("sqlite://", creator=lambda: _connect_read_only(path), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            found = schema.version_of(_stored_version(connection), str(path))
            if found < schema.SCHEMA_VERSION:
                raise ConfigError(
                    f"telemetry database {path} has schema version {found}, and this Twofold reads version "
                    f"{schema.SCHEMA_VERSION}; upgrade it: twofold telemetry upgrade --telemetry-url sqlite:///{path}"
                )
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise ConfigError(
            f"telemetry database {path} cannot be read: {_cause(error)}; "
            "give the file a Twofold server writes with --telemetry-url or TWOFOLD_TELEMETRY_URL"
        ) from None
    return engine


def _connect_read_only(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=10.0, check_same_thread=False)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        connection.close()
        if Path(f"{path}-wal").exists():
            raise
        # A WAL database in a directory without write permission and without a writer: SQLite can only read it as an
        # immutable file.
        return sqlite3.connect(f"{uri}&immutable=1", uri=True, check_same_thread=False)
    return connection


def _cause(error: Exception) -> object:
    return getattr(error, "orig", None) or error


def _unwritable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"telemetry database {path} cannot be written: {_cause(error)}; "
        "make the file and its directory writable or choose another file with --telemetry-url"
    )


def _lock(path: Path) -> TextIO:
    try:
        lock_file = open(f"{path}.lock", "a", encoding="ascii")  # noqa: SIM115
    except OSError as error:
        raise _unwritable(path, error) from None
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock_file
        except OSError:
            time.sleep(_LOCK_PAUSE_S)
    lock_file.close()
    raise ConfigError(
        f"telemetry database {path} is being written by another process; "
        "stop that one or choose another file with --telemetry-url"
    )


def _create(path: Path) -> Engine:
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False),
        poolclass=StaticPool,
    )
    try:
        with engine.connect() as connection:
            found = schema.SCHEMA_VERSION
            if connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one():
                found = schema.version_of(_stored_version(connection), str(path))
            # Takes effect on an empty file only: lets retention shrink the file when its limit is lowered.
            connection.exec_driver_sql("PRAGMA auto_vacuum = INCREMENTAL")
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            connection.exec_driver_sql("PRAGMA synchronous = NORMAL")
            # Debian's SQLite overwrites deleted data; telemetry holds no secrets, and deleting must be quick.
            connection.exec_driver_sql("PRAGMA secure_delete = OFF")
            connection.commit()
            if found < schema.SCHEMA_VERSION:
                upgrade_file(connection, path, found)
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            schema.metadata.create_all(connection)
            views.create_views(connection)
            connection.exec_driver_sql(
                "INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(schema.SCHEMA_VERSION),)
            )
            connection.commit()
    except (SQLAlchemyError, sqlite3.Error) as error:
        engine.dispose()
        raise _unwritable(path, error) from None
    except ConfigError:
        engine.dispose()
        raise
    return engine


def _stored_version(connection: Connection) -> str | None:
    has_meta = connection.exec_driver_sql(
        "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'meta'"
    ).scalar_one()
    if not has_meta:
        return None
    version = connection.exec_driver_sql("SELECT value FROM meta WHERE key = 'schema_version'").scalar()
    return None if version is None else str(version)
