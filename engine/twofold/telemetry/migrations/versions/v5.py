"""Native events in blocks; host, machine and level of a run; times of a request; the kernel's counters; load tests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"

_log = logging.getLogger("twofold.telemetry")
_BLOCK_EVENTS = 4096
_REPORT_EVERY_S = 2.0

# The columns of version 4 in the order of their blobs, with the types of the entries.
_ARRAYS = {"experts": "<u2", "placement": "u1", "weights": "<f4"}
_FIELDS = {
    "token_layer": {
        "step": "<u4", "position": "<i4", "layer": "<i2",
        "num_routed": "u1", "num_hits": "u1", "num_cpu": "u1", "num_fetched": "u1", **_ARRAYS,
        "layer_us": "<f4", "cpu_us": "<f4", "gpu_us": "<f4", "predicted_us": "<f4",
    },
    "upload": {
        "step": "<u4", "request": "<i8", "layer": "<i2", "expert": "<u2", "slot": "<i4", "size_bytes": "<i8",
        "queued_us": "<f8", "begin_us": "<f8", "end_us": "<f8", "reason": "u1", "lane": "u1",
    },
    "cache_event": {
        "step": "<u4", "request": "<i8", "layer": "<i2", "kind": "u1", "expert": "<u2",
        "victim": "<i4", "slot": "<i4", "value": "<f4", "victim_value": "<f4", "price": "<f4", "at_us": "<f8",
    },
}  # fmt: skip


_REQUEST_PARTS = (
    *("read", "parse_wait", "parse", "tokenise_wait", "template", "tokenise", "compile"),
    *("queue_wall", "prefill_wall", "decode_wall"),
)


def upgrade() -> None:
    op.add_column("run", sa.Column("host", sa.Text, nullable=False, server_default=""))
    op.add_column("step", sa.Column("involuntary_switches", sa.Integer))
    op.add_column("step", sa.Column("major_faults", sa.Integer))
    op.add_column("step", sa.Column("cpu_us", sa.Float))
    op.add_column("run", sa.Column("telemetry_level", sa.Text, nullable=False, server_default="expert"))
    op.add_column("run", sa.Column("context_limit_reason", sa.Text, nullable=False, server_default=""))
    op.add_column("run", sa.Column("machine_json", sa.Text, nullable=False, server_default="{}"))
    op.add_column("request", sa.Column("answer_json", sa.Text))
    op.add_column("step", sa.Column("begin_us", sa.Float))
    _add_drafts()
    _add_request_times()
    for name, column in (("itl_p95_ms", sa.Float), ("stage", sa.Text), ("name", sa.Text)):
        op.add_column("load_sample", sa.Column(name, column))
    op.add_column("load_sample", sa.Column("gave_up", sa.Integer, nullable=False, server_default="0"))
    _create_machine_sample()
    for kind in _FIELDS:
        _create_blocks(kind)
        _fill_blocks(op.get_bind(), kind)
        op.drop_table(kind)


def _add_drafts() -> None:
    """Drafted tokens of steps and requests."""
    for table, columns in (
        ("step", ("num_drafted_tokens", "num_accepted_tokens")),
        ("request", ("accepted_tokens", "rejected_tokens")),
    ):
        for name in columns:
            op.add_column(table, sa.Column(name, sa.Integer, nullable=False, server_default="0"))
    op.add_column("step", sa.Column("predicted_us", sa.Float, nullable=False, server_default="0"))


def _add_request_times() -> None:
    """Wall times of a request by part; older requests began when they were submitted."""
    for name in ("received_s", *(f"{part}_s" for part in _REQUEST_PARTS)):
        op.add_column("request", sa.Column(name, sa.Float, nullable=False, server_default="0"))
    op.add_column("request", sa.Column("first_sent_s", sa.Float))
    op.execute("UPDATE request SET received_s = submitted_s")


def _create_machine_sample() -> None:
    op.create_table(
        "machine_sample",
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.run_id"), nullable=False),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.Column("load_1m", sa.Float, nullable=False),
        *(sa.Column(name, sa.Float) for name in ("clock_mhz", "lowest_clock_mhz", "temperature_c")),
        sa.Column("available_bytes", sa.Integer),
    )
    op.create_index("machine_sample_by_time", "machine_sample", ["run_id", "at_s"])


def _keys(kind: str) -> list[str]:
    """Columns of a block that hold one value for all its events, in front of its steps."""
    return ["run_id", "request"] if kind == "token_layer" else ["run_id"]


def _create_blocks(kind: str) -> None:
    table = f"{kind}_block"
    numbers = [*_keys(kind)[1:], "first_step", "last_step", "num_events"]
    op.create_table(
        table,
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.run_id"), nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in numbers),
        *(sa.Column(name, sa.LargeBinary, nullable=False) for name in _FIELDS[kind]),
    )
    op.create_index(f"{table}_by_step", table, ["run_id", "first_step", "last_step"])
    if kind == "token_layer":
        op.create_index(f"{table}_by_request", table, ["run_id", "request", "first_step"])


def _fill_blocks(connection: sa.Connection, kind: str) -> None:
    """Pack the rows of `kind` in the order in which they were written, those of a request together."""
    keys, fields = _keys(kind), _FIELDS[kind]
    total = connection.exec_driver_sql(f"SELECT count(*) FROM {kind}").scalar_one()  # noqa: S608
    columns = ", ".join([*keys, *fields])
    found = connection.exec_driver_sql(
        f"SELECT {columns} FROM {kind} ORDER BY {', '.join(keys)}, rowid"  # noqa: S608
    )
    marks = ", ".join("?" * (len(keys) + 3 + len(fields)))
    insert = (
        f"INSERT INTO {kind}_block ({', '.join(keys)}, first_step, last_step, num_events, {', '.join(fields)}) "  # noqa: S608
        f"VALUES ({marks})"
    )
    done, due_s = 0, time.monotonic() + _REPORT_EVERY_S
    for block in _blocks(found, len(keys)):
        connection.exec_driver_sql(insert, _packed(block, len(keys), fields))
        done += len(block)
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _REPORT_EVERY_S
            _log.info("upgrading %s: %d of %d rows", kind, done, total)


def _blocks(found: sa.CursorResult[Any], num_keys: int) -> Iterator[list[sa.Row[Any]]]:
    """Consecutive rows with equal keys, at most _BLOCK_EVENTS of them."""
    for _, rows in groupby(found.yield_per(_BLOCK_EVENTS), key=itemgetter(slice(num_keys))):
        while block := list(islice(rows, _BLOCK_EVENTS)):
            yield block


def _packed(block: Sequence[sa.Row[Any]], num_keys: int, fields: dict[str, str]) -> tuple[Any, ...]:
    columns = list(zip(*block, strict=True))
    steps = columns[num_keys]
    first = min(steps)
    blobs = []
    for name, values in zip(fields, columns[num_keys:], strict=True):
        if name in _ARRAYS:
            width = max(map(len, values))
            blobs.append(b"".join(value.ljust(width, b"\0") for value in values))
        else:
            packed = np.array(values) - first if name == "step" else np.array(values)
            blobs.append(packed.astype(fields[name]).tobytes())
    return (*block[0][:num_keys], first, max(steps), len(block), *blobs)
