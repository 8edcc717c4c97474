"""Databases of older versions."""

from __future__ import annotations

import sqlite3
from pathlib import Path

OLD_FILES = Path(__file__).with_name("old_files")
VERSIONS = [int(file.stem.removeprefix("v")) for file in sorted(OLD_FILES.glob("v*.sql"))]


def old_file(path: Path, version: int) -> Path:
    """A database as the software of that version wrote it."""
    connection = sqlite3.connect(path)
    connection.executescript((OLD_FILES / f"v{version}.sql").read_text(encoding="utf-8"))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    return path
