"""Column `run.host`: several machines may write one database. Wall times of a request by part."""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"

_REQUEST_PARTS = (
    *("read", "parse_wait", "parse", "tokenise_wait", "template", "tokenise", "compile"),
    *("queue_wall", "prefill_wall", "decode_wall"),
)


def upgrade() -> None:
    op.add_column("run", sa.Column("host", sa.Text, nullable=False, server_default=""))
    for name in ("received_s", *(f"{part}_s" for part in _REQUEST_PARTS)):
        op.add_column("request", sa.Column(name, sa.Float, nullable=False, server_default="0"))
    op.add_column("request", sa.Column("first_sent_s", sa.Float))
    op.execute("UPDATE request SET received_s = submitted_s")
