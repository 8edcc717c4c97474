"""The one thread and the one connection that write the telemetry database.

Producers append to a bounded queue and return at once; the thread takes what has gathered, turns it into
tuples and inserts it in one transaction. What does not fit in the queue is counted by kind and stored in
table `dropped`. An error of the database never reaches the engine: it is logged once, kept in
`stats().last_error`, and the events it cost are counted like any other drop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TextIO

import numpy as np
from sqlalchemy import Connection, Engine, Table

from twofold.telemetry import database, retention, rows, schema
from twofold.telemetry.sink import LoadSample, NullSink, TelemetrySink, check_event_dtype
from twofold.types import RequestRecord, RunInfo, StepRecord

_log = logging.getLogger("twofold.telemetry")

MAX_QUEUED_ROWS: Final = 262_144
"""About 45 MB of token_layer events: four seconds of a 48-layer model prefilling at 1,300 tokens/s."""
MAX_TRANSACTION_ROWS: Final = 16_384
_RESERVED_ROWS: Final = 8_192
"""Room that native events leave to requests and steps, without which they would mean little."""
_CHUNK_ROWS: Final = 1024
"""Rows turned into tuples at a time: the interpreter lock is held for well under a millisecond."""
MAX_DATABASE_BYTES: Final = 2 * 1024**3
_LOOK_AT_SIZE_ROWS: Final = 50_000
_REMEMBERED_STEPS: Final = 10_000
_FLUSH_INTERVAL_S: Final = 0.2
_HEARTBEAT_S: Final = 1.0


def _insert_sql(table: Table, *, replace: bool = False) -> str:
    names = [column.name for column in table.columns]
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    return f"{verb} INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"


_INSERT_TOKEN_LAYER = _insert_sql(schema.token_layer)
_INSERT_UPLOAD = _insert_sql(schema.upload)
_INSERT_CACHE_EVENT = _insert_sql(schema.cache_event)
_INSERT_LAYER_SECOND = _insert_sql(schema.layer_second)
_INSERT_STEP = _insert_sql(schema.step, replace=True)
_INSERT_REQUEST = _insert_sql(schema.request, replace=True)
_INSERT_LOAD_SAMPLE = _insert_sql(schema.load_sample)
_INSERT_DROPPED = _insert_sql(schema.dropped)


@dataclass(frozen=True)
class SinkStats:
    """What the writer has done so far."""

    num_written: int
    """Rows committed, roll-ups not counted."""
    num_dropped: int
    """Events lost in native rings, in the queue or to database errors."""
    last_error: str | None
    """Of the database; None after it recovered."""


@dataclass(frozen=True)
class _Item:
    kind: str
    payload: Any
    num_rows: int
    arrived_s: float


class DatabaseSink:
    """A `TelemetrySink` that writes SQLite; made by `open_sink`, which checks all that can be wrong."""

    def __init__(
        self,
        engine: Engine,
        lock_file: TextIO,
        *,
        max_queued_rows: int = MAX_QUEUED_ROWS,
        max_bytes: int = MAX_DATABASE_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._lock_file = lock_file
        self._max_queued_rows = max_queued_rows
        self._max_bytes = max_bytes
        self._now = now
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._items: deque[_Item] = deque()
        self._queued_rows = 0
        self._lost: Counter[tuple[str, str]] = Counter()
        self._num_dropped = 0
        self._closing = False
        # The rest belongs to the writer thread.
        self._run: _Item | None = None
        self._run_id: int | None = None
        self._step_seconds: dict[int, int] = {}
        self._num_written = 0
        self._num_written_at_last_look = 0
        self._last_error: str | None = None
        self._next_heartbeat_s = 0.0
        self._has_trimmed = False
        self._thread = threading.Thread(target=self._work, name="twofold-telemetry", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------------------

    def begin_run(self, run: RunInfo) -> None:
        with self._mutex:
            if not self._closing:
                self._items.append(_Item("run", run, 0, self._now()))
        self._wake.set()

    def request(self, record: RequestRecord) -> None:
        self._push("request", record, 1)

    def step(self, record: StepRecord) -> None:
        self._push("step", record, 1)

    def load_samples(self, rows: list[LoadSample]) -> None:
        if rows:
            self._push("load_sample", list(rows), len(rows))

    def native_events(self, kind: str, rows: rows.Events) -> None:
        check_event_dtype(kind, rows)
        if len(rows):
            self._push(kind, rows, len(rows))

    def dropped(self, kind: str, count: int) -> None:
        if count > 0:
            with self._mutex:
                self._lose(kind, "ring", count)

    def stats(self) -> SinkStats:
        with self._mutex:
            return SinkStats(self._num_written, self._num_dropped, self._last_error)

    def close(self) -> None:
        with self._mutex:
            self._closing = True
        self._wake.set()
        self._thread.join()

    def _push(self, kind: str, payload: Any, num_rows: int) -> None:
        with self._mutex:
            limit = self._max_queued_rows + (0 if kind in _NATIVE else _RESERVED_ROWS)
            room = 0 if self._closing else max(0, limit - self._queued_rows)
            if num_rows > room:
                self._lose(kind, "queue", num_rows - room)
                num_rows = room
            if num_rows:
                if isinstance(payload, list):
                    payload = payload[:num_rows]
                elif kind in _NATIVE:
                    payload = payload[:num_rows].copy()
                self._items.append(_Item(kind, payload, num_rows, self._now()))
                self._queued_rows += num_rows
            crowded = self._queued_rows >= MAX_TRANSACTION_ROWS
        if crowded:
            self._wake.set()

    def _lose(self, kind: str, place: str, count: int) -> None:
        """With the mutex held."""
        self._lost[kind, place] += count
        self._num_dropped += count

    # -- the writer thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._wake.wait(_FLUSH_INTERVAL_S)
            self._wake.clear()
            with self._mutex:
                closing = self._closing
            while batch := self._take():
                self._write(batch)
                self._keep_size()
            if closing:
                break
            if self._now() >= self._next_heartbeat_s:
                self._write([])
        self._write([], finished=True)
        self._engine.dispose()
        self._lock_file.close()

    def _take(self) -> list[_Item]:
        """The next items, up to a transaction's worth and never across the beginning of a run."""
        batch: list[_Item] = []
        num_rows = 0
        with self._mutex:
            while self._items and num_rows < MAX_TRANSACTION_ROWS:
                if batch and self._items[0].kind == "run":
                    break
                item = self._items.popleft()
                batch.append(item)
                num_rows += item.num_rows
            self._queued_rows -= num_rows
        return batch

    def _write(self, batch: list[_Item], *, finished: bool = False) -> None:
        if batch and batch[0].kind == "run":
            self._run, self._run_id = batch.pop(0), None
            self._step_seconds.clear()
        with self._mutex:
            lost, self._lost = self._lost, Counter()
        try:
            with self._engine.begin() as connection:
                run_id = self._run_id if self._run_id is not None else self._insert_run(connection)
                orphans = self._insert(connection, run_id, batch)
                if run_id is not None:
                    self._insert_marks(connection, run_id, lost, finished=finished)
        except Exception as error:  # whatever it is, the engine goes on and the loss is counted
            self._failed(batch, lost, error)
            return
        with self._mutex:
            self._run_id = run_id
            self._num_written += sum(item.num_rows for item in batch) - sum(orphans.values())
            for kind, count in orphans.items():
                self._lose(kind, "queue", count)
            if run_id is None:
                self._lost.update(lost)
            recovered, self._last_error = self._last_error is not None, None
        if recovered:
            _log.warning("telemetry is being written again; %d events were lost so far", self._num_dropped)

    def _keep_size(self) -> None:
        if self._num_written - self._num_written_at_last_look < _LOOK_AT_SIZE_ROWS:
            return
        self._num_written_at_last_look = self._num_written
        try:
            removed = retention.trim(self._engine, self._max_bytes)
        except Exception as error:  # tried again later; writing itself will say if the database is broken
            _log.warning("old telemetry could not be removed: %s", getattr(error, "orig", None) or error)
            return
        if removed and not self._has_trimmed:
            self._has_trimmed = True
            _log.info(
                "the telemetry database has reached %.1f GB: its oldest details are removed from now on",
                self._max_bytes / 1e9,
            )

    def _failed(self, batch: list[_Item], lost: Counter[tuple[str, str]], error: Exception) -> None:
        cause = getattr(error, "orig", None) or error
        with self._mutex:
            self._lost.update(lost)
            for item in batch:
                self._lose(item.kind, "database", item.num_rows)
            first, self._last_error = self._last_error is None, str(cause)
        self._next_heartbeat_s = self._now() + _HEARTBEAT_S
        if first:
            _log.error(
                "telemetry is not being written: %s; the engine goes on, lost events are counted", cause
            )

    def _insert_run(self, connection: Connection) -> int | None:
        if self._run is None:
            return None
        names = [column.name for column in schema.run.columns][1:]
        cursor = connection.exec_driver_sql(
            f"INSERT INTO run ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",  # noqa: S608
            rows.run_row(self._run.payload, self._run.arrived_s),
        )
        return int(cursor.lastrowid)

    def _insert(self, connection: Connection, run_id: int | None, batch: list[_Item]) -> Counter[str]:
        """Insert a batch; returns what could not be, by kind, because no run has begun."""
        samples = [s for item in batch if item.kind == "load_sample" for s in item.payload]
        _execute(
            connection, _INSERT_LOAD_SAMPLE, (rows.load_sample_row(run_id, sample) for sample in samples)
        )
        orphans: Counter[str] = Counter()
        if run_id is None:
            for item in batch:
                if item.kind != "load_sample":
                    orphans[item.kind] += item.num_rows
            return orphans
        requests = [rows.request_row(run_id, item.payload) for item in batch if item.kind == "request"]
        _execute(connection, _INSERT_REQUEST, requests)
        steps = [rows.step_row(run_id, item.payload) for item in batch if item.kind == "step"]
        _execute(connection, _INSERT_STEP, steps)
        self._remember_steps(batch)
        self._insert_native(connection, run_id, batch)
        return orphans

    def _insert_native(self, connection: Connection, run_id: int, batch: list[_Item]) -> None:
        events_by_kind: dict[str, rows.Events] = {}
        seconds_by_kind: dict[str, rows.Seconds] = {}
        for kind, (sql, to_rows) in _NATIVE.items():
            items = [item for item in batch if item.kind == kind]
            if not items:
                continue
            events = np.concatenate([item.payload for item in items])
            arrivals = np.repeat([int(item.arrived_s) for item in items], [item.num_rows for item in items])
            events_by_kind[kind], seconds_by_kind[kind] = events, self._seconds_of(events["step"], arrivals)
            for begin in range(0, len(events), _CHUNK_ROWS):
                _execute(connection, sql, to_rows(run_id, events[begin : begin + _CHUNK_ROWS]))
        num_experts = self._run.payload.num_experts if self._run is not None else 0
        sums = rows.layer_second_rows(run_id, num_experts, events_by_kind, seconds_by_kind)
        _execute(connection, _INSERT_LAYER_SECOND, sums)

    def _seconds_of(self, steps: rows.Seconds, arrivals: rows.Seconds) -> rows.Seconds:
        """When each event's step began; when the event arrived, where its step was lost or is yet to come."""
        known, index = np.unique(steps, return_inverse=True)
        begun = np.array([self._step_seconds.get(step, -1) for step in known.tolist()], np.int64)[index]
        return np.where(begun >= 0, begun, arrivals)

    def _remember_steps(self, batch: list[_Item]) -> None:
        for item in batch:
            if item.kind == "step":
                self._step_seconds[item.payload.step] = int(item.payload.started_s)
        while len(self._step_seconds) > _REMEMBERED_STEPS:
            del self._step_seconds[next(iter(self._step_seconds))]

    def _insert_marks(
        self, connection: Connection, run_id: int, lost: Counter[tuple[str, str]], *, finished: bool
    ) -> None:
        now_s = self._now()
        losses = [(run_id, now_s, kind, place, count) for (kind, place), count in lost.items()]
        _execute(connection, _INSERT_DROPPED, losses)
        if finished or now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + _HEARTBEAT_S
            connection.exec_driver_sql(
                "UPDATE run SET last_seen_s = ?, finished_s = ? WHERE run_id = ?",
                (now_s, now_s if finished else None, run_id),
            )


_NATIVE: Final = {
    "token_layer": (_INSERT_TOKEN_LAYER, rows.token_layer_rows),
    "upload": (_INSERT_UPLOAD, rows.upload_rows),
    "cache_event": (_INSERT_CACHE_EVENT, rows.cache_event_rows),
}


def _execute(connection: Connection, sql: str, tuples: Iterable[rows.Row]) -> None:
    remaining = iter(tuples)
    while chunk := list(islice(remaining, _CHUNK_ROWS)):
        connection.exec_driver_sql(sql, chunk)


def open_sink(
    url: str | None,
    *,
    max_queued_rows: int = MAX_QUEUED_ROWS,
    max_bytes: int = MAX_DATABASE_BYTES,
    now: Callable[[], float] = time.time,
) -> TelemetrySink:
    """The sink for a telemetry URL; None or an empty one means no telemetry. `now` gives Unix time.

    Beyond `max_bytes` the oldest details are removed (see `retention`).

    Raises ConfigError, with the remedy, where the URL is bad, its directory is missing, the file cannot be
    written, is being written by another process, or holds something else than this version's tables.
    """
    if not url:
        return NullSink()
    engine, lock_file = database.open_for_writing(schema.database_path(url))
    return DatabaseSink(engine, lock_file, max_queued_rows=max_queued_rows, max_bytes=max_bytes, now=now)
