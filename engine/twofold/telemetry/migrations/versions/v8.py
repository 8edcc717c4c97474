"""Table training_step: steps of fine-tuning. Column run.kind tells its runs from those of servers."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "8"
down_revision = "7"

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "training_step",
        sa.Column("run_id", _INTEGER, sa.ForeignKey("run.run_id"), primary_key=True),
        sa.Column("step", _INTEGER, primary_key=True, comment="optimiser steps done; the first one is 1"),
        _column("num_steps", _INTEGER, "of the whole run"),
        _column("at_s", sa.Float(), "Unix time of its end"),
        _column("loss", sa.Float(), "mean of the step's answer tokens, nats"),
        _column("learning_rate", sa.Float()),
        _column("grad_norm", sa.Float(), "length of the gradient before clipping"),
        _column("num_tokens", _INTEGER, "tokens of its micro-batches, with padding"),
        _column(
            "tokens_per_s",
            sa.Float(),
            "of the step's forward and backward, without evaluations and checkpoints",
        ),
        _column("remaining_s", sa.Float(), "forecast of the time to the end, seconds"),
        _column("memory_bytes", _INTEGER, "resident memory of the process, with mapped files"),
        sa.Column("eval_loss", sa.Float(), comment="held-out loss after the step, nats; NULL: not evaluated"),
        _column(
            "expert_load",
            sa.LargeBinary(),
            "zlib of uint32[MoE layers, experts]: tokens routed to each expert; may be empty",
            server_default="",
        ),
    )
    comment = "serving, or training: its steps are in table training_step"
    op.add_column("run", _column("kind", sa.Text(), comment, server_default=sa.text("'serving'")))


def _column(name: str, kind: Any, comment: str | None = None, **more: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment, **more)
