"""Writes one transaction: a batch of queued items as rows of their run.

Independent of queue and thread: `writer` decides when to write, and handles a batch that could not be written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, select, update

from twofold.api.types import StepRecord
from twofold.telemetry import machine_samples, rows, schema, statements
from twofold.telemetry.blocks import block_rows, joined
from twofold.telemetry.sink import TelemetryLevel
from twofold.telemetry.totals import NUM_TRANSACTIONS, totals_of

_BLOCK_EVENTS: Final = 4096
"""Events packed at a time, and most events of a block: holds the interpreter lock for a millisecond."""
_REMEMBERED_SECONDS: Final = 600
_MACHINE_SAMPLE_S: Final = 5.0

Losses = Counter[tuple[str, str]]
"""Events by (kind, place)."""


@dataclass(slots=True)
class Item:
    """One queue entry: a run, a record, a list of steps, or rows."""

    kind: str
    payload: Any
    num_rows: int
    arrived_s: float
    run: int = 0
    """Number of its run in this process."""

    def split(self, num_rows: int) -> tuple[Item, Item]:
        """The first `num_rows` rows, and the rest; only for arrays and lists."""
        head, tail = self.payload[:num_rows], self.payload[num_rows:]
        return (
            Item(self.kind, head, num_rows, self.arrived_s, self.run),
            Item(self.kind, tail, self.num_rows - num_rows, self.arrived_s, self.run),
        )


@dataclass(frozen=True)
class Written:
    """Rows written by a transaction; passed to `RunWriter.committed` after the commit."""

    run_id: int | None
    rows: Counter[str] = field(default_factory=Counter)
    """Rows written, by kind."""
    orphans: Counter[str] = field(default_factory=Counter)
    """Rows by kind that could not be written because no run has begun."""
    losses: Losses = field(default_factory=Counter)


class _StepSeconds:
    """The second in which each recent step began, as the first step of each second."""

    def __init__(self) -> None:
        self._first_steps: list[int] = []
        self._seconds: list[int] = []
        self._last_step = -1

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add steps, in the order of their numbers."""
        if not steps:
            return
        seconds = np.array([step.started_s for step in steps]).astype(np.int64)
        begins = np.flatnonzero(
            np.diff(seconds, prepend=self._seconds[-1] if self._seconds else seconds[0] - 1)
        )
        self._first_steps.extend(steps[begin].step for begin in begins.tolist())
        self._seconds.extend(seconds[begins].tolist())
        self._last_step = steps[-1].step
        del self._first_steps[:-_REMEMBERED_SECONDS], self._seconds[:-_REMEMBERED_SECONDS]

    def of(self, steps: rows.Seconds, arrivals: rows.Seconds) -> rows.Seconds:
        """Second of each event by its step; its arrival where the step is too old or yet to come. A lost step counts
        as begun in the second of the step before it."""
        if not self._seconds:
            return arrivals
        place = np.searchsorted(self._first_steps, steps, side="right") - 1
        known = (place >= 0) & (steps <= self._last_step)
        return np.where(known, np.array(self._seconds)[place], arrivals)


class RunWriter:
    """Writer of the current run. `write` changes no state until `committed`, so a failed transaction can be
    repeated."""

    def __init__(self, level: TelemetryLevel) -> None:
        self._level = level
        self._run: Item | None = None
        self.is_over = False
        """Whether the run has ended, so that it is to be marked as finished."""
        self.next_heartbeat_s = 0.0
        self._run_id: int | None = None
        self._ended_run_id: int | None = None
        self._seconds = _StepSeconds()
        self._next_machine_sample_s = 0.0
        self._num_transactions = 0
        self._rows: Counter[str] = Counter()
        self._losses: Losses = Counter()

    def begin(self, run: Item) -> None:
        """Begin a run: what follows belongs to it, and the previous run is over."""
        self._run, self._ended_run_id, self._run_id = run, self._run_id, None
        self._seconds = _StepSeconds()
        self._num_transactions = 0
        self._rows, self._losses = Counter(), Counter()

    def forget(self) -> tuple[Counter[str], Losses]:
        """Continue the run in a new file after its file was deleted. Returns the rows and losses written to the old
        file."""
        gone = self._rows, self._losses
        self._run_id = self._ended_run_id = None
        self._num_transactions = 0
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
        load_samples = (rows.load_sample_row(run_id, sample) for sample in samples)
        statements.insert(connection, schema.load_sample, load_samples)
        counts: Counter[str] = Counter()
        for item in batch:
            counts[item.kind] += item.num_rows
        if run_id is None:
            return Written(
                None, Counter(load_sample=len(samples)), counts - Counter(load_sample=len(samples))
            )
        self._insert(connection, run_id, batch)
        losses = [(run_id, kind, place, now_s, count) for (kind, place), count in lost.items()]
        statements.replace(connection, schema.dropped, losses, added="num_events")
        if heartbeat or finished:
            _mark(connection, run_id, now_s, finished=finished)
        if heartbeat and now_s >= self._next_machine_sample_s:
            self._next_machine_sample_s = now_s + _MACHINE_SAMPLE_S
            sample = machine_samples.read(now_s)
            statements.insert(connection, schema.machine_sample, [rows.machine_sample_row(run_id, sample)])
        return Written(run_id, counts, losses=Counter(lost))

    def committed(self, written: Written) -> None:
        """Update the state after the transaction was committed."""
        self._run_id, self._ended_run_id = written.run_id, None
        self._rows += written.rows
        self._losses += written.losses
        self._num_transactions += written.run_id is not None

    def was_committed(self, connection: Connection, written: Written) -> bool:
        """Whether the database holds the transaction that was the next one, although its commit failed."""
        total = schema.run_total.c
        counted = select(total.amount).where(total.run_id == written.run_id, total.name == NUM_TRANSACTIONS)
        return bool(connection.execute(counted).scalar() == self._num_transactions + 1)

    def _insert_run(self, connection: Connection) -> int | None:
        if self._run is None:
            return None
        values = rows.run_values(self._run.payload, self._run.arrived_s, self._level)
        return statements.insert_run(connection, values)

    def _insert(self, connection: Connection, run_id: int, batch: list[Item]) -> None:
        requests = [rows.request_row(run_id, item.payload) for item in batch if item.kind == "request"]
        statements.replace(connection, schema.request, requests)
        changes = [rows.control_row(run_id, item.payload) for item in batch if item.kind == "control"]
        statements.insert(connection, schema.control, changes)
        trained = [item.payload for item in batch if item.kind == "training_step"]
        with_load = self._level != "step"
        trained_rows = [rows.training_step_row(run_id, each, with_load=with_load) for each in trained]
        statements.replace(connection, schema.training_step, trained_rows)
        steps = [step for item in batch if item.kind == "step" for step in item.payload]
        statements.replace(connection, schema.step, rows.step_rows(run_id, steps))
        self._seconds.add(steps)
        events = self._insert_native(connection, run_id, batch)
        totals = totals_of(steps, events)
        totals[NUM_TRANSACTIONS] = 1
        added = [(run_id, name, amount) for name, amount in totals.items() if amount]
        statements.replace(connection, schema.run_total, added, added="amount")

    def _insert_native(
        self, connection: Connection, run_id: int, batch: list[Item]
    ) -> dict[str, rows.Events]:
        events_by_kind: dict[str, rows.Events] = {}
        seconds_by_kind: dict[str, rows.Seconds] = {}
        for kind, table in schema.BLOCKS.items():
            items = [item for item in batch if item.kind == kind]
            if not items:
                continue
            events = joined([item.payload for item in items])
            arrivals = np.repeat([int(item.arrived_s) for item in items], [item.num_rows for item in items])
            events_by_kind[kind] = events
            if kind in rows.SUMMED:
                seconds_by_kind[kind] = self._seconds.of(events["step"], arrivals)
            for begin in range(0, len(events) if self._level == "expert" else 0, _BLOCK_EVENTS):
                block = events[begin : begin + _BLOCK_EVENTS]
                statements.insert(connection, table, block_rows(kind, run_id, block))
        num_experts = self._run.payload.num_experts if self._run is not None else 0
        sums = rows.layer_second_rows(run_id, num_experts, events_by_kind, seconds_by_kind)
        statements.insert(connection, schema.layer_second, sums)
        return events_by_kind


@dataclass(frozen=True)
class UnconfirmedCommit:
    """A transaction whose commit failed without a word of the database: it may have been committed."""

    run: RunWriter
    written: Written
    batch: list[Item]
    lost: Losses


def _mark(connection: Connection, run_id: int, now_s: float, *, finished: bool) -> None:
    """Refresh when the run was last seen, and when it ended."""
    changed = update(schema.run).where(schema.run.c.run_id == run_id)
    connection.execute(changed.values(last_seen_s=now_s, finished_s=now_s if finished else None))
