"""Opening the SQLite file: once for writing, any number of times for reading."""

from __future__ import annotations

import fcntl
import sqlite3
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from twofold.errors import ConfigError
from twofold.telemetry import schema


def open_for_writing(path: Path) -> tuple[Engine, TextIO]:
    """The only writing connection, its tables made, and the lock that keeps it the only one.

    The lock is `FILE.lock`, held until closed: two connections that write or checkpoint at once may damage a
    WAL database on SQLite 3.7.0 to 3.51.2. Raises ConfigError with the remedy.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"telemetry database {path}: directory {path.parent} does not exist; "
            f"create it (mkdir -p {path.parent}) or choose another file with --telemetry-url"
        )
    if path.is_dir():
        raise ConfigError(f"telemetry database {path} is a directory; give a file with --telemetry-url")
    for place in (path, path.parent):
        # Said by its mode alone, because the superuser could write it all the same.
        if place.exists() and not place.stat().st_mode & 0o222:
            raise _unwritable(path, PermissionError(f"{place} is read-only"))
    lock_file = _lock(path)
    try:
        return _create(path), lock_file
    except BaseException:
        lock_file.close()
        raise


def open_for_reading(path: Path) -> Engine:
    """Connections that can only read, each opened when used. ConfigError when there is nothing to read."""
    if not path.is_file():
        raise ConfigError(
            f"telemetry database {path} does not exist; start a server with --telemetry-url first"
        )
    engine = create_engine("sqlite://", creator=lambda: _connect_read_only(path), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            schema.check_version(_stored_version(connection), path)
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
        # A WAL database whose directory we may not write, and which nobody writes now: SQLite can only read
        # it as an immutable file.
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
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock_file.close()
        raise ConfigError(
            f"telemetry database {path} is being written by another process; "
            "stop that one or choose another file with --telemetry-url"
        ) from None
    return lock_file


def _create(path: Path) -> Engine:
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(path, timeout=10.0, check_same_thread=False),
        poolclass=StaticPool,
    )
    try:
        with engine.connect() as connection:
            if connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one():
                schema.check_version(_stored_version(connection), path)
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            connection.exec_driver_sql("PRAGMA synchronous = NORMAL")
            # Debian's SQLite overwrites what is deleted; telemetry holds no secrets, and removing must be quick.
            connection.exec_driver_sql("PRAGMA secure_delete = OFF")
            connection.commit()
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            schema.metadata.create_all(connection)
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
