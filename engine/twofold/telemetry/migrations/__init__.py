"""Upgrades of the database's tables: one Alembic revision per published schema version, in `versions`.

The newest revision is the version that this Twofold writes. `python -m scripts.telemetry_migration` drafts the next one
from the difference between the newest revision and `schema`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy import Connection

FOLDER: Final = Path(__file__).parent
_NUMBERS: Final = sorted(int(file.stem.removeprefix("v")) for file in (FOLDER / "versions").glob("v*.py"))
OLDEST: Final = _NUMBERS[0]
"""Oldest schema version that can be upgraded."""
NEWEST: Final = _NUMBERS[-1]


def upgrade(connection: Connection, found: int) -> None:
    """Apply the revisions after version `found`, within the caller's transaction."""
    # Alembic takes a tenth of a second to import, and most files need no upgrade.
    from alembic.migration import MigrationContext
    from alembic.operations import Operations
    from alembic.script import ScriptDirectory

    revisions = list(ScriptDirectory(str(FOLDER)).iterate_revisions("head", str(found)))
    with Operations.context(MigrationContext.configure(connection)):
        for revision in reversed(revisions):
            revision.module.upgrade()
    connection.exec_driver_sql(f"UPDATE meta SET value = '{NEWEST}' WHERE key = 'schema_version'")  # noqa: S608
