"""What tells causes, choices and machines apart: columns of run, step, machine_sample and load_sample."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "9"
down_revision = "8"

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
_NULLABLE: dict[str, list[tuple[str, Any, str]]] = {
    "step": [
        ("kv_use", sa.Float(), "share of the KV pages in use after it; NULL before version 9"),
        ("num_preemptions", _INTEGER, "sequences preempted since the step before; NULL before version 9"),
    ],
    "machine_sample": [
        ("gpu_percent", sa.Float(), "mean over the GPUs: share of the time in which kernels ran"),
        ("gpu_clock_mhz", sa.Float(), "lowest clock of the GPUs' processors"),
        ("gpu_power_w", sa.Float(), "sum over the GPUs"),
        ("gpu_temperature_c", sa.Float(), "highest of the GPUs"),
        ("vram_used_bytes", _INTEGER, "sum over the GPUs"),
        ("vram_bytes", _INTEGER, "memory of the GPUs"),
    ],
    "load_sample": [
        ("prompt_tokens", _INTEGER, "NULL where the server reported none"),
        ("itls_json", sa.Text(), "inter-token times, JSON array of milliseconds; NULL without any"),
        (
            "plan_json",
            sa.Text(),
            "mix, shape, length and objectives of the test; of some of its samples only",
        ),
    ],
}
_TEXTS_OF_RUN = [
    ("run_name", "--run-name; empty without one"),
    ("run_tags", "--run-tag, with commas between several"),
]


def upgrade() -> None:
    for table, columns in _NULLABLE.items():
        for name, kind, comment in columns:
            op.add_column(table, sa.Column(name, kind, nullable=True, comment=comment))
    for name, comment in _TEXTS_OF_RUN:
        column = sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False, comment=comment)
        op.add_column("run", column)
