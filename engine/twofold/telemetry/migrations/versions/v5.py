"""Column `run.host`: several machines may write one database."""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    op.add_column("run", sa.Column("host", sa.Text, nullable=False, server_default=""))
