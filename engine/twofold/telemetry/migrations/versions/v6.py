"""Trace and routing decision of requests, replica of runs."""

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"


def upgrade() -> None:
    op.add_column(
        "request",
        sa.Column(
            "trace_id",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="W3C trace id that came with the request; empty without one",
        ),
    )
    op.add_column(
        "request",
        sa.Column(
            "routed_by",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="why a fleet's router chose the replica: prefix, load, retry; empty: no router",
        ),
    )
    op.add_column(
        "run",
        sa.Column(
            "replica",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="id of the replica in its fleet; empty without --ray",
        ),
    )
