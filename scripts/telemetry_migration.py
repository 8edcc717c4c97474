"""Drafts the next revision of the telemetry tables: `python -m scripts.telemetry_migration "what changes"`.

Upgrades the oldest published tables to the newest revision, compares them with the schema in the code, and writes the
difference as the next file of `engine/twofold/telemetry/migrations/versions`. Read the draft before you commit it.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from pathlib import Path
from typing import Final

from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool
from twofold.telemetry import migrations, schema

ROOT: Final = Path(__file__).resolve().parents[1]
OLDEST_TABLES: Final = ROOT / "tests" / "telemetry" / "old_files" / f"v{migrations.OLDEST}.sql"
_FILE: Final = '''"""{message}."""

import sqlalchemy as sa
from alembic import op

revision = "{number}"
down_revision = "{previous}"


def upgrade() -> None:
{body}
'''


def draft(message: str) -> str | None:
    """Text of the next revision; None if the newest one has the tables of the schema."""
    tables = sqlite3.connect(":memory:", check_same_thread=False)
    tables.executescript(OLDEST_TABLES.read_text(encoding="utf-8"))
    with create_engine("sqlite://", creator=lambda: tables, poolclass=StaticPool).connect() as connection:
        migrations.upgrade(connection, migrations.OLDEST)
        operations = produce_migrations(MigrationContext.configure(connection), schema.metadata).upgrade_ops
    if operations is None or operations.is_empty():
        return None
    lines = render_python_code(operations).splitlines()
    body = "\n".join(line for line in lines if not line.strip().startswith("###")).strip()
    number = migrations.NEWEST + 1
    return _FILE.format(message=message.rstrip("."), number=number, previous=number - 1, body=f"    {body}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("message", help="first line of the revision: which columns change, and why")
    text = draft(parser.parse_args().message)
    if text is None:
        print("the newest revision has the tables of the schema already", file=sys.stderr)
        return 1
    file = migrations.FOLDER / "versions" / f"v{migrations.NEWEST + 1}.py"
    file.write_text(text, encoding="utf-8")
    print(file.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
