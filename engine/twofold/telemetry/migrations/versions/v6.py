"""Trace and routing decision of requests, replica of runs, devices of experts, uploads and cache events."""

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"

_TEXTS = {
    ("request", "trace_id"): "W3C trace id that came with the request; empty without one",
    ("request", "routed_by"): "why a fleet's router chose the replica: prefix, load, retry; empty: no router",
    ("run", "replica"): "id of the replica in its fleet; empty without --ray",
}
_DEVICES = {
    "token_layer_block": ("devices", "uint8[num_events, width]: uint8[num_routed]: device that ran it"),
    "upload_block": ("device", "uint8[num_events]: that the slot belongs to"),
    "cache_event_block": ("device", "uint8[num_events]: that the slot belongs to"),
}


def upgrade() -> None:
    for (table, name), comment in _TEXTS.items():
        text = sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False, comment=comment)
        op.add_column(table, text)
    # An empty blob: all entries are 0, the only device of older runs.
    for table, (name, comment) in _DEVICES.items():
        column = sa.Column(name, sa.LargeBinary, server_default="", nullable=False, comment=comment)
        op.add_column(table, column)
