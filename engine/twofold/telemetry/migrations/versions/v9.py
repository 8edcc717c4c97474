"""KV pages and preemptions by step; GPUs in the samples of the machine."""

import sqlalchemy as sa
from alembic import op

revision = "9"
down_revision = "8"

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")
_STEP = [
    ("kv_use", sa.Float(), "share of the KV pages in use after it; NULL before version 9"),
    ("num_preemptions", _INTEGER, "sequences preempted since the step before; NULL before version 9"),
]
_MACHINE_SAMPLE = [
    ("gpu_percent", sa.Float(), "mean over the GPUs: share of the time in which kernels ran"),
    ("gpu_clock_mhz", sa.Float(), "lowest clock of the GPUs' processors"),
    ("gpu_power_w", sa.Float(), "sum over the GPUs"),
    ("gpu_temperature_c", sa.Float(), "highest of the GPUs"),
    ("vram_used_bytes", _INTEGER, "sum over the GPUs"),
    ("vram_bytes", _INTEGER, "memory of the GPUs"),
]


def upgrade() -> None:
    for table, columns in (("step", _STEP), ("machine_sample", _MACHINE_SAMPLE)):
        for name, kind, comment in columns:
            op.add_column(table, sa.Column(name, kind, nullable=True, comment=comment))
