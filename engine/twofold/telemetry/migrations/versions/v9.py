"""What tells causes, choices and machines apart: columns of run, step, request, machine_sample, load_sample."""

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
        ("engine_cpu_us", sa.Float(), "CPU time of the engine's thread"),
        ("collection_us", sa.Float(), "garbage collections of Python, which stop its threads"),
        ("num_full_collections", _INTEGER, "collections of the oldest generation"),
        (
            "num_counted_steps",
            _INTEGER,
            "steps, this one last, that counts since the last one cover; NULL: counted with a later step",
        ),
        ("minor_faults", _INTEGER, "pages of the process mapped without reading, since the last count"),
        ("voluntary_switches", _INTEGER, "times that the engine's thread waited, since then"),
        (
            "core_wait_us",
            sa.Float(),
            "time that the engine's thread was ready and had no core, since then; NULL: unknown",
        ),
        (
            "others_core_wait_us",
            sa.Float(),
            "the same of the other thread of the process that waited longest",
        ),
        ("others_cpu_us", sa.Float(), "CPU time of Python's other threads, since then"),
        (
            "num_pinned_threads",
            _INTEGER,
            "computing threads with fewer cores than at the engine's start; NULL: not read, the step was not long",
        ),
        ("num_misses", _INTEGER, "routed experts that were not resident; NULL: no slots"),
        ("num_fetched", _INTEGER, "of them: uploaded on demand"),
        ("upload_bytes", _INTEGER, "uploaded experts, for all reasons"),
    ],
    "request": [
        (
            "longest_gap_s",
            sa.Float(),
            "wall: longest time from one token of the answer to the next; NULL: fewer than two, or version 8",
        ),
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
