"""A PostgreSQL server of the tests' own: an empty cluster on a Unix socket, run by an unprivileged user."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",
    "shared_buffers": "16MB",
    "max_connections": "30",
    "log_min_messages": "warning",
}


def programs() -> Path | None:
    """The folder of initdb and pg_ctl; None if no server is installed."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(folders) if (folder / "initdb").is_file()), None)


class PostgresServer:
    """A cluster in a folder of its own; stopped and started at will."""

    def __init__(self, binaries: Path, folder: Path, user: str | None) -> None:
        self._binaries, self._user = binaries, user
        self.folder = folder
        self._run("initdb", "-D", self.data, "-U", "twofold", "-A", "trust", "--no-sync", "-E", "UTF8")
        settings = {**SETTINGS, "unix_socket_directories": str(folder)}
        with (self.data / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-t", "60", "-l", self.folder / "log", "start")

    def stop(self, mode: str = "immediate") -> None:
        """ "immediate" is a crash, "fast" ends every connection and writes everything."""
        self._run("pg_ctl", "-D", self.data, "-w", "-t", "60", "-m", mode, "stop")

    def new_database(self, name: str) -> str:
        """URL of a new, empty database."""
        self.sql("postgres", f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://twofold@/{name}?host={self.folder}"

    def sql(self, database: str, statement: str) -> list[Any]:
        """Rows of a statement."""
        with psycopg.connect(
            host=str(self.folder), user="twofold", dbname=database, autocommit=True
        ) as connection:
            done = connection.execute(statement)  # type: ignore[call-overload]
            return done.fetchall() if done.description else []

    def _run(self, program: str, *arguments: object) -> None:
        done = subprocess.run(
            [str(self._binaries / program), *map(str, arguments)],
            check=False,
            capture_output=program not in ("pg_ctl",),  # the server keeps its output open
            text=True,
            timeout=120,
            user=self._user,
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A running server; skips the test if none is installed."""
    binaries = programs()
    if binaries is None:
        pytest.skip("no PostgreSQL server here (Debian: apt-get install postgresql)")
    user = None
    if os.getuid() == 0:  # the server refuses to run as root
        known = {entry.pw_name for entry in pwd.getpwall()}
        user = next((name for name in ("postgres", "daemon") if name in known), None)
        if user is None:
            pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres or daemon")
    # Not tmp_path: its parents are closed to other users, and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="twofold-pg-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(binaries, folder, user)
        try:
            yield server
        finally:
            with suppress(AssertionError):  # a test has stopped it
                server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
