"""Column `run.host`: several machines may write one database. Columns of `step`: the kernel's counters of a step."""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    op.add_column("run", sa.Column("host", sa.Text, nullable=False, server_default=""))
    op.add_column("step", sa.Column("involuntary_switches", sa.Integer))
    op.add_column("step", sa.Column("major_faults", sa.Integer))
    op.add_column("step", sa.Column("cpu_us", sa.Float))
