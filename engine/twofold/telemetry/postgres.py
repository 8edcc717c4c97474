"""PostgreSQL as the telemetry database: several engines write one, each its own runs.

An engine holds an advisory lock on its run. The lock ends with the engine's connection, so readers see at once which
runs are live. Tables without a primary key get a column `rowid` that rises with time, as SQLite's rows have one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, LargeBinary, Text, create_engine, func, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from twofold.api.errors import ConfigError
from twofold.telemetry import migrations, schema, views
from twofold.telemetry.retention import Budget, Room

LOCK_CLASS: Final = 0x74776F66
"""First number of Twofold's advisory locks; the second is the run, or 0 for changes of the tables."""
_CONNECT_S: Final = 3
_CHECK_ROOM_S: Final = 10.0
_TRANSIENT: Final = ("08", "25", "40", "53", "55", "57", "58")
"""Classes of SQLSTATE that say something of the server, not of the rows: connection, read-only, conflict, resources."""


def make_engine(url: URL, *, read_only: bool) -> Engine:
    """Connections that are checked before use, so that a restarted server is noticed; opened when used."""
    options = "-c statement_timeout=60000 -c lock_timeout=5000"
    if read_only:
        options += " -c default_transaction_read_only=on"
    try:
        engine = create_engine(
            url,
            pool_size=4 if read_only else 1,
            max_overflow=4 if read_only else 0,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": _CONNECT_S,
                "tcp_user_timeout": 5000,
                "application_name": "twofold",
                "options": options,
            },
        )
    except ModuleNotFoundError:
        raise ConfigError(
            f"telemetry URL {label_of(url)} needs psycopg, which is not installed; "
            'install it: pip install "twofold[postgres]"'
        ) from None
    from twofold.telemetry.postgres_numbers import register

    register(engine)
    return engine


def label_of(url: URL) -> str:
    """The URL without its password."""
    return url.render_as_string(hide_password=True)


def cause_of(error: Exception) -> str:
    """The error of the server or the driver, in one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


@dataclass
class PostgresDatabase:
    """The one connection by which an engine writes."""

    label: str
    """The URL without its password."""
    engine: Engine
    confirms_commits: bool = True
    """A connection lost during a commit does not say whether the server has committed."""
    _run_ids: frozenset[int] = frozenset()
    _next_check_s: float = 0.0

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction on a connection that holds the locks of the runs."""
        with self.engine.begin() as connection:
            self._hold_lock(connection)
            yield connection

    def record_runs(self, run_ids: Set[int]) -> None:
        """Hold the locks of these runs from now on, on whichever connection is open."""
        self._run_ids = frozenset(run_ids)
        with contextlib.suppress(SQLAlchemyError), self.transaction():
            pass

    def _hold_lock(self, connection: Connection) -> None:
        held = connection.info.get("run_ids", frozenset())
        for run_id in self._run_ids - held:
            connection.exec_driver_sql("SELECT pg_try_advisory_lock(%s, %s)", (LOCK_CLASS, run_id))
        for run_id in held - self._run_ids:
            connection.exec_driver_sql("SELECT pg_advisory_unlock(%s, %s)", (LOCK_CLASS, run_id))
        connection.info["run_ids"] = self._run_ids

    def prepare(self, budget: Budget) -> None:
        """Nothing: a server manages its own log."""

    def make_room(self, budget: Budget) -> Room:
        """Remove a tenth of the oldest rows if the rows take more than nine tenths of the budget; looks every ten
        seconds. The server vacuums what was removed, and uses its space again."""
        removed = 0
        if time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + _CHECK_ROOM_S
            with self.transaction() as connection:
                if stored_bytes(connection) > 0.9 * budget.max_bytes:
                    removed = remove_oldest(connection, 0.1)
        return Room(True, removed)

    def is_gone(self) -> bool:
        """A server has no file that could be deleted while it is written."""
        return False

    def is_transient(self, error: Exception) -> bool:
        """Whether another attempt may succeed: the server is away, restarts, or has no room."""
        import psycopg

        cause = getattr(error, "orig", None) or error
        if not isinstance(cause, psycopg.Error):
            return False
        if cause.sqlstate:
            return cause.sqlstate[:2] in _TRANSIENT
        return isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)

    def close_gone(self) -> None:
        self.engine.dispose()

    def close(self) -> None:
        # The server notices the end of a connection only after a while, and its runs would count as live until then.
        self.record_runs(frozenset())
        self.engine.dispose()


def open_for_writing(url: URL) -> PostgresDatabase:
    """Open the database with its tables; make or upgrade them if need be. ConfigError with the remedy."""
    engine = make_engine(url, read_only=False)
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s, 0)", (LOCK_CLASS,))
            _prepare_tables(connection, label_of(url))
    except SQLAlchemyError as error:
        engine.dispose()
        raise ConfigError(
            f"telemetry database {label_of(url)} cannot be written: {cause_of(error)}; start the server, create the "
            "database (createdb), or give another with --telemetry-url"
        ) from None
    except BaseException:
        engine.dispose()
        raise
    return PostgresDatabase(label_of(url), engine)


def _prepare_tables(connection: Connection, name: str) -> None:
    present = set(inspect(connection).get_table_names())
    if not present & set(schema.metadata.tables):
        schema.metadata.create_all(connection)
        for table in schema.metadata.tables.values():
            if not len(table.primary_key):
                connection.exec_driver_sql(
                    f"ALTER TABLE {table.name} ADD COLUMN rowid BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
                )
        connection.execute(
            schema.meta.insert().values(key="schema_version", value=str(schema.SCHEMA_VERSION))
        )
    else:
        found = schema.version_of(stored_version(connection, present), name)
        if found == schema.SCHEMA_VERSION:
            return
        views.drop_views(connection)
        migrations.upgrade(connection, found)
    views.create_views(connection)


def stored_version(connection: Connection, present: set[str]) -> str | None:
    """The schema version in table `meta`; None without one."""
    if "meta" not in present:
        return None
    found = connection.exec_driver_sql("SELECT value FROM meta WHERE key = 'schema_version'").scalar()
    return None if found is None else str(found)


@lru_cache(maxsize=8)
def _reading_engine(url: URL) -> Engine:
    """One pool for all readers of a process."""
    return make_engine(url, read_only=True)


def open_for_reading(url: URL) -> Engine:
    """Read-only connections. ConfigError if there is nothing to read."""
    engine = _reading_engine(url)
    try:
        with engine.connect() as connection:
            present = set(inspect(connection).get_table_names())
            if not present:
                raise ConfigError(
                    f"telemetry database {label_of(url)} is empty; start a server with --telemetry-url first"
                )
            found = schema.version_of(stored_version(connection, present), label_of(url))
    except SQLAlchemyError as error:
        raise ConfigError(
            f"telemetry database {label_of(url)} cannot be read: {cause_of(error)}; "
            "give the URL a Twofold server writes with --telemetry-url or TWOFOLD_TELEMETRY_URL"
        ) from None
    if found < schema.SCHEMA_VERSION:
        raise ConfigError(
            f"telemetry database {label_of(url)} has schema version {found}, and this Twofold reads version "
            f"{schema.SCHEMA_VERSION}; upgrade it: twofold telemetry upgrade --telemetry-url URL"
        )
    return engine


def describe(url: URL) -> str:
    """Version of the server, size of the database and version of its tables, in one line. ConfigError if it cannot be
    reached, or holds tables of another program or of a newer Twofold."""
    try:
        with _reading_engine(url).connect() as connection:
            server = connection.exec_driver_sql("SHOW server_version").scalar_one()
            size = connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one()
            present = set(inspect(connection).get_table_names())
            tables = "no tables yet"
            if present:
                tables = (
                    f"schema version {schema.version_of(stored_version(connection, present), label_of(url))}"
                )
    except SQLAlchemyError as error:
        raise ConfigError(f"telemetry database {label_of(url)} cannot be read: {cause_of(error)}") from None
    return f"PostgreSQL {str(server).split()[0]} at {label_of(url)}, {size / 1e6:.1f} MB, {tables}"


def written_runs(connection: Connection) -> set[int]:
    """Runs whose engine is connected and writes them."""
    found = connection.exec_driver_sql(
        "SELECT objid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid <> 0 AND classid = %s "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        (LOCK_CLASS,),
    )
    return {int(run_id) for (run_id,) in found}


_STORED_TABLES: Final = (*schema.BLOCKS.values(), schema.step, schema.layer_second, schema.request)
_ROW_OVERHEAD: Final = 80
"""Bytes of a row's header and index entries."""


def stored_bytes(connection: Connection) -> int:
    """Bytes of the rows: their number times the mean size of the newest. The space of deleted rows is used again."""
    total = 0.0
    for table in _STORED_TABLES:
        count = connection.execute(select(func.count()).select_from(table)).scalar_one()
        mean = connection.execute(text(_mean_size_sql(table.name))).scalar() or 0.0
        total += count * (float(mean) + _ROW_OVERHEAD)
    return int(total)


@cache
def _mean_size_sql(name: str) -> str:
    table = schema.metadata.tables[name]
    long = [c.name for c in table.columns if isinstance(c.type, LargeBinary | Text)]
    numbers = 8 * (len(table.columns) - len(long))
    sizes = " + ".join([str(numbers), *(f'pg_column_size("{column}")' for column in long)])
    newest = "step" if name == "step" else "number" if name == "request" else "rowid"
    return f"SELECT avg({sizes}) FROM (SELECT * FROM {name} ORDER BY {newest} DESC LIMIT 64) AS newest"  # noqa: S608


def remove_oldest(connection: Connection, share: float) -> int:
    """Remove the oldest `share` of blocks and steps, and then of sums; returns how many rows. One engine at a time."""
    alone = connection.exec_driver_sql("SELECT pg_try_advisory_xact_lock(%s, 0)", (LOCK_CLASS,)).scalar_one()
    if not alone:
        return 0
    removed = 0
    for table in (*schema.BLOCKS.values(), schema.layer_second):
        removed += _remove_before(connection, table.name, "rowid", share)
    return removed + _remove_before(connection, "step", "started_s", share)


def _remove_before(connection: Connection, table: str, column: str, share: float) -> int:
    found: Any = connection.exec_driver_sql(
        f"DELETE FROM {table} WHERE {column} < (SELECT min({column}) + (max({column}) - min({column})) * {share:g} "  # noqa: S608
        f"FROM {table})"
    )
    return int(found.rowcount)
