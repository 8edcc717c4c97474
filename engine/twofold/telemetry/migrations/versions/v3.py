"""The first published version."""

revision = "3"
down_revision = None


def upgrade() -> None:
    """Nothing: the tables are those of version 3."""
