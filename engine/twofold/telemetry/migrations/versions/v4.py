"""Table `control`: changes made to a running engine."""

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    op.create_table(
        "control",
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.run_id"), nullable=False),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("num_slots", sa.Integer, nullable=False),
        sa.Column("num_pages", sa.Integer, nullable=False),
    )
    op.create_index("control_by_time", "control", ["run_id", "at_s"])
