"""Column request.adapter."""

import sqlalchemy as sa
from alembic import op

revision = "7"
down_revision = "6"


def upgrade() -> None:
    comment = "LoRA adapter that computed it, or NAME*SCALE of several; empty: none"
    text = sa.Column("adapter", sa.Text(), server_default=sa.text("''"), nullable=False, comment=comment)
    op.add_column("request", text)
