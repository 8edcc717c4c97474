"""Writes one transaction: a batch of queued items as rows of their run.

Independent of queue and thread: `writer` decides when to write, and handles a batch that could not be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, Table

from twofold.telemetry import machine_samples, rows, schema
from twofold.telemetry.blocks import block_rows
from twofold.telemetry.sink import TelemetryLevel
from twofold.telemetry.totals import totals_of

_CHUNK_ROWS: Final = 1024
"""Rows converted to tuples at a time: holds the interpreter lock for well under a millisecond."""
_BLOCK_EVENTS: Final = 4096
"""Events packed at a time, and most events of a block: holds the interpreter lock for a millisecond."""
_REMEMBERED_STEPS: Final = 10_000

Losses = Counter[tuple[str, str]]
"""Events by (kind, place)."""


def _insert_sql(table: Table, *, replace: bool = False) -> str:
    names = schema.column_names(table)
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    return f"{verb} INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


_INSERT_LAYER_SECOND: Final = _insert_sql(schema.layer_second)
_INSERT_STEP: Final = _insert_sql(schema.step, replace=True)
_INSERT_REQUEST: Final = _insert_sql(schema.request, replace=True)
_INSERT_CONTROL: Final = _insert_sql(schema.control)
_INSERT_MACHINE_SAMPLE: Final = _insert_sql(schema.machine_sample)
_MACHINE_SAMPLE_S: Final = 5.0
_INSERT_LOAD_SAMPLE: Final = _insert_sql(schema.load_sample)
_ADD_DROPPED: Final = (
    f"{_insert_sql(schema.dropped)} ON CONFLICT DO UPDATE "
    "SET at_s = excluded.at_s, num_events = num_events + excluded.num_events"
)
_ADD_TOTAL: Final = (
    f"{_insert_sql(schema.run_total)} ON CONFLICT DO UPDATE SET amount = amount + excluded.amount"
)
NATIVE: Final = {kind: _insert_sql(table) for kind, table in schema.BLOCKS.items()}
"""Insert statements of events that arrive as arrays."""


@dataclass(frozen=True)
class Item:
    """One queue entry: a run, a record, or rows."""

    kind: str
    payload: Any
    num_rows: int
    arrived_s: float

    def split(self, num_rows: int) -> tuple[Item, Item]:
        """The first `num_rows` rows, and the rest; only for arrays and lists."""
        head, tail = self.payload[:num_rows], self.payload[num_rows:]
        return (
            Item(self.kind, head, num_rows, self.arrived_s),
            Item(self.kind, tail, self.num_rows - num_rows, self.arrived_s),
        )


@dataclass(frozen=True)
class Written:
    """What a transaction wrote; passed to `RunWriter.committed` after the commit."""

    run_id: int | None
    rows: Counter[str] = field(default_factory=Counter)
    """Rows written, by kind."""
    orphans: Counter[str] = field(default_factory=Counter)
    """Rows by kind that could not be written because no run has begun."""
    losses: Losses = field(default_factory=Counter)


class RunWriter:
    """Writer of the current run. `write` changes no state until `committed`, so a failed transaction can be
    repeated."""

    def __init__(self, level: TelemetryLevel) -> None:
        self._level = level
        self._run: Item | None = None
        self._run_id: int | None = None
        self._ended_run_id: int | None = None
        self._step_seconds: dict[int, int] = {}
        self._next_machine_sample_s = 0.0
        self._rows: Counter[str] = Counter()
        self._losses: Losses = Counter()

    def begin(self, run: Item) -> None:
        """Begin a run: what follows belongs to it, and the previous run is over."""
        self._run, self._ended_run_id, self._run_id = run, self._run_id, None
        self._step_seconds.clear()
        self._rows, self._losses = Counter(), Counter()

    def forget(self) -> tuple[Counter[str], Losses]:
        """Continue the run in a new file after its file was deleted. Returns the rows and losses written to the old
        file."""
        gone = self._rows, self._losses
        self._run_id = self._ended_run_id = None
        self._rows, self._losses = Counter(), Counter()
        return gone

    def write(
        self,
        connection: Connection,
        batch: list[Item],
        lost: Losses,
        *,
        now_s: float,
        heartbeat: bool,
        finished: bool,
    ) -> Written:
        """Write the batch, the losses since the last one, and the run's last-seen time if `heartbeat`. Call within a
        transaction."""
        if self._ended_run_id is not None:
            _mark(connection, self._ended_run_id, now_s, finished=True)
        run_id = self._run_id if self._run_id is not None else self._insert_run(connection)
        samples = [s for item in batch if item.kind == "load_sample" for s in item.payload]
        _execute(
            connection, _INSERT_LOAD_SAMPLE, (rows.load_sample_row(run_id, sample) for sample in samples)
        )
        counts: Counter[str] = Counter()
        for item in batch:
            counts[item.kind] += item.num_rows
        if run_id is None:
            return Written(
                None, Counter(load_sample=len(samples)), counts - Counter(load_sample=len(samples))
            )
        self._insert(connection, run_id, batch)
        _execute(
            connection,
            _ADD_DROPPED,
            [(run_id, kind, place, now_s, count) for (kind, place), count in lost.items()],
        )
        if heartbeat or finished:
            _mark(connection, run_id, now_s, finished=finished)
        if heartbeat and now_s >= self._next_machine_sample_s:
            self._next_machine_sample_s = now_s + _MACHINE_SAMPLE_S
            sample = machine_samples.read(now_s)
            _execute(connection, _INSERT_MACHINE_SAMPLE, [rows.machine_sample_row(run_id, sample)])
        return Written(run_id, counts, losses=Counter(lost))

    def committed(self, written: Written) -> None:
        """Update the state after the transaction was committed."""
        self._run_id, self._ended_run_id = written.run_id, None
        self._rows += written.rows
        self._losses += written.losses

    def _insert_run(self, connection: Connection) -> int | None:
        if self._run is None:
            return None
        names = schema.column_names(schema.run)[1:]
        cursor = connection.exec_driver_sql(
            f"INSERT INTO run ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",  # noqa: S608
            rows.run_row(self._run.payload, self._run.arrived_s, self._level),
        )
        return int(cursor.lastrowid)

    def _insert(self, connection: Connection, run_id: int, batch: list[Item]) -> None:
        requests = [rows.request_row(run_id, item.payload) for item in batch if item.kind == "request"]
        _execute(connection, _INSERT_REQUEST, requests)
        changes = [rows.control_row(run_id, item.payload) for item in batch if item.kind == "control"]
        _execute(connection, _INSERT_CONTROL, changes)
        steps = [item.payload for item in batch if item.kind == "step"]
        _execute(connection, _INSERT_STEP, [rows.step_row(run_id, step) for step in steps])
        for step in steps:
            self._step_seconds[step.step] = int(step.started_s)
        while len(self._step_seconds) > _REMEMBERED_STEPS:
            del self._step_seconds[next(iter(self._step_seconds))]
        events = self._insert_native(connection, run_id, batch)
        totals = totals_of(steps, events)
        _execute(
            connection, _ADD_TOTAL, [(run_id, name, amount) for name, amount in totals.items() if amount]
        )

    def _insert_native(
        self, connection: Connection, run_id: int, batch: list[Item]
    ) -> dict[str, rows.Events]:
        events_by_kind: dict[str, rows.Events] = {}
        seconds_by_kind: dict[str, rows.Seconds] = {}
        for kind, sql in NATIVE.items():
            items = [item for item in batch if item.kind == kind]
            if not items:
                continue
            events = np.concatenate([item.payload for item in items])
            arrivals = np.repeat([int(item.arrived_s) for item in items], [item.num_rows for item in items])
            events_by_kind[kind], seconds_by_kind[kind] = events, self._seconds_of(events["step"], arrivals)
            for begin in range(0, len(events) if self._level == "expert" else 0, _BLOCK_EVENTS):
                _execute(connection, sql, block_rows(kind, run_id, events[begin : begin + _BLOCK_EVENTS]))
        num_experts = self._run.payload.num_experts if self._run is not None else 0
        sums = rows.layer_second_rows(run_id, num_experts, events_by_kind, seconds_by_kind)
        _execute(connection, _INSERT_LAYER_SECOND, sums)
        return events_by_kind

    def _seconds_of(self, steps: rows.Seconds, arrivals: rows.Seconds) -> rows.Seconds:
        """Second in which each event's step began, or the event's arrival where its step was lost or is yet to come."""
        known, index = np.unique(steps, return_inverse=True)
        begun = np.array([self._step_seconds.get(step, -1) for step in known.tolist()], np.int64)[index]
        return np.where(begun >= 0, begun, arrivals)


def _mark(connection: Connection, run_id: int, now_s: float, *, finished: bool) -> None:
    connection.exec_driver_sql(
        "UPDATE run SET last_seen_s = ?, finished_s = ? WHERE run_id = ?",
        (now_s, now_s if finished else None, run_id),
    )


def _execute(connection: Connection, sql: str, tuples: Iterable[rows.Row]) -> None:
    remaining = iter(tuples)
    while chunk := list(islice(remaining, _CHUNK_ROWS)):
        connection.exec_driver_sql(sql, chunk)
