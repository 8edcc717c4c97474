"""Writes the telemetry database with one thread and one connection.

Producers append to a bounded queue and return at once; the thread writes queued rows in one transaction. Rows that do
not fit in the queue are counted by kind and stored in table `dropped`. A database error never reaches the engine: it is
logged once and kept in `stats().last_error`. While the database is locked by another process, the disk is full or the
file is missing, rows wait in the queue. Rows lost to any other error are counted like other drops.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any, Final

from twofold.api.config import TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.telemetry import retention, rows, stores
from twofold.telemetry.run_sink import RunSink
from twofold.telemetry.run_writer import Item, Losses, RunWriter, UnconfirmedCommit, Written
from twofold.telemetry.sink import (
    EVENT_DTYPES,
    LOSS_PLACES,
    LossPlace,
    SinkStats,
    TelemetryLevel,
    TelemetrySink,
    check_event_dtype,
)
from twofold.telemetry.stores import Store

_log = logging.getLogger("twofold.telemetry")

MAX_QUEUED_ROWS: Final = 262_144
"""About 45 MB of token_layer events: four seconds of a 48-layer model prefilling at 1,300 tokens/s."""
_RESERVED_ROWS: Final = 8_192
"""Queue room that native events leave to requests and steps, without which they would mean little."""
_SHED_FIRST: Final = "cache_event"
"""Given up for other rows where the queue is full: placements and uploads tell most of it."""
MAX_DATABASE_BYTES: Final = TelemetryConfig.telemetry_max_bytes
_FLUSH_INTERVAL_S: Final = 0.1
"""From the begin of one write to the begin of the next, so that a slow write does not postpone the next one."""
_FIRST_PAUSE_S: Final = 0.2
_HEARTBEAT_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 2.0
"""Longest pause between two attempts on a database that cannot be written now."""
_CLOSE_PATIENCE_S: Final = 10.0
"""How long `close` tries to write queued rows."""


class _NoRoomError(Exception):
    """No room for another transaction within the size limit at present."""


class DatabaseSink(RunSink):
    """Writes a database: a run of its own, and those of `another_run`. Created by `open_sink`, which checks the
    URL and the file."""

    def __init__(
        self,
        url: str,
        *,
        level: TelemetryLevel = "expert",
        max_queued_rows: int = MAX_QUEUED_ROWS,
        max_bytes: int = MAX_DATABASE_BYTES,
        now: Callable[[], float] = time.time,
    ) -> None:
        opened = stores.open_for_writing(url)
        self.takes_events, self.url = level != "step", url
        super().__init__(self, 0)
        self._label = opened.label
        self._level = level
        self._max_queued_rows = max_queued_rows
        self._budget = retention.Budget(max_bytes)
        self._now = now
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._items: deque[Item] = deque()
        self._queued_rows = 0
        self._lost: Losses = Counter()
        self._dropped: Counter[LossPlace] = Counter()
        self._closing = False
        self._num_written = 0
        self._last_error: str | None = None
        # The rest belongs to the writer thread.
        self._database: Store | None = opened
        self._unconfirmed: UnconfirmedCommit | None = None
        self._runs = {0: RunWriter(level)}
        self._run_ids: dict[int, int] = {}
        """Number in the database of each run that is being written."""
        self._last_run = 0
        self._pause_s = 0.0
        self._has_trimmed = False
        self._unchecked_rows = 0
        """Rows that may be written before the size of the file is read again."""
        opened.prepare(self._budget)
        self._thread = threading.Thread(target=self._work, name="twofold-telemetry", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------------------

    def another_run(self) -> TelemetrySink:
        with self._mutex:
            self._last_run += 1
            return RunSink(self, self._last_run)

    def put(self, kind: str, payload: Any, run: int) -> None:
        """Queue a record of a run, a list of load samples, or the run's begin ("run") or end ("end")."""
        if kind == "step":
            with self._mutex:
                last = self._items[-1] if self._items else None
                # A loaded small model takes thousands of steps a second: an entry each would cost a microsecond.
                is_of_run = last is not None and last.kind == "step" and last.run == run
                if last is not None and is_of_run and self._has_room_for_a_record():
                    last.payload.append(payload)
                    last.num_rows += 1
                    self._queued_rows += 1
                    return
            self._push(kind, [payload], 1, run)
        elif kind in ("run", "end"):
            with self._mutex:
                if not self._closing:
                    self._items.append(Item(kind, payload, 0, self._now(), run))
            self._wake.set()
        elif kind != "load_sample":
            self._push(kind, payload, 1, run)
        elif payload:
            self._push(kind, list(payload), len(payload), run)

    def put_events(self, kind: str, rows: rows.Events, run: int) -> None:
        check_event_dtype(kind, rows)
        if len(rows) and self.takes_events:
            self._push(kind, rows, len(rows), run)

    def dropped(self, kind: str, count: int) -> None:
        if count > 0:
            with self._mutex:
                self._count_lost(kind, "ring", count)

    def recorded_run_id(self, run: int) -> int | None:
        """Number in the database of a run of this process; None before its first row is stored."""
        return self._run_ids.get(run)

    def stats(self) -> SinkStats:
        with self._mutex:
            dropped = {place: self._dropped[place] for place in LOSS_PLACES}
            return SinkStats(self._level, self._num_written, self._queued_rows, dropped, self._last_error)

    def close(self) -> None:
        with self._mutex:
            self._closing = True
        self._wake.set()
        self._thread.join()

    def _has_room_for_a_record(self) -> bool:
        """Call with the mutex held."""
        return not self._closing and self._queued_rows < self._max_queued_rows + _RESERVED_ROWS

    def _push(self, kind: str, payload: Any, num_rows: int, run: int) -> None:
        with self._mutex:
            limit = self._max_queued_rows + (0 if kind in EVENT_DTYPES else _RESERVED_ROWS)
            room = 0 if self._closing else max(0, limit - self._queued_rows)
            if num_rows > room and kind != _SHED_FIRST and not self._closing:
                shed = _shed(self._items, num_rows - room)
                self._queued_rows -= shed
                room += shed
                if shed:
                    self._count_lost(_SHED_FIRST, "queue", shed)
            if num_rows > room:
                self._count_lost(kind, "queue", num_rows - room)
                num_rows = room
            if num_rows:
                if isinstance(payload, list):
                    payload = payload[:num_rows]
                elif kind in EVENT_DTYPES:
                    payload = payload[:num_rows].copy()
                self._items.append(Item(kind, payload, num_rows, self._now(), run))
                self._queued_rows += num_rows
            crowded = self._queued_rows >= self._budget.transaction_rows
        if crowded:
            self._wake.set()

    def _count_lost(self, kind: str, place: LossPlace, count: int) -> None:
        """Call with the mutex held."""
        self._lost[kind, place] += count
        self._dropped[place] += count

    # -- the writer thread ---------------------------------------------------------------------------------

    def _work(self) -> None:
        deadline_s: float | None = None
        due_s = time.monotonic() + _FLUSH_INTERVAL_S
        while True:
            self._wake.wait(max(0.0, due_s - time.monotonic()))
            self._wake.clear()
            due_s = time.monotonic() + _FLUSH_INTERVAL_S
            with self._mutex:
                closing = self._closing
            if closing and deadline_s is None:
                deadline_s = time.monotonic() + _CLOSE_PATIENCE_S
            written: set[int] = set()
            batch = self._take(written)
            # What comes during a write waits for the next one, unless it fills a transaction.
            while batch and self._write(batch, run := batch[0].run):
                written.add(run)
                batch = self._take(set() if closing or self._is_queue_full() else written)
            if closing and (not (batch or self._unconfirmed) or time.monotonic() >= (deadline_s or 0.0)):
                break
            if not batch:
                self._write_heartbeats()
            if self._pause_s:
                time.sleep(self._pause_s)
        self._discard_queue()
        for run in list(self._runs):
            self._write([], run, finished=True)
        if self._database is not None:
            self._database.close()

    def _write_heartbeats(self) -> None:
        for run, writer in list(self._runs.items()):
            if self._now() >= writer.next_heartbeat_s or writer.is_over:
                self._write([], run)

    def _is_queue_full(self) -> bool:
        with self._mutex:
            return self._queued_rows >= self._budget.transaction_rows

    def _take(self, but: Collection[int]) -> list[Item]:
        """The next items of one run that is not in `but`, at most a transaction's worth of rows and never across the
        beginning or the end of a run.

        Their rows count as queued until they are committed or lost.
        """
        batch: list[Item] = []
        left: list[Item] = []
        room = self._budget.transaction_rows
        with self._mutex:
            while self._items and room > 0:
                item = self._items.popleft()
                if item.run != batch[0].run if batch else item.run in but:
                    left.append(item)
                    continue
                if batch and item.kind in ("run", "end"):
                    self._items.appendleft(item)
                    break
                if item.num_rows > room:
                    item, tail = item.split(room)
                    self._items.appendleft(tail)
                batch.append(item)
                room -= item.num_rows
            self._items.extendleft(reversed(left))
        return batch

    def _write(self, batch: list[Item], run: int, *, finished: bool = False) -> bool:
        """Write one transaction of a run. False if it failed and the batch is back in the queue for another attempt."""
        writer = self._runs.setdefault(run, RunWriter(self._level))
        if batch and batch[0].kind == "run":
            writer.begin(batch.pop(0))
        elif batch and batch[0].kind == "end":
            batch.pop(0)
            writer.is_over = True
        finished = finished or writer.is_over
        if self._unconfirmed is not None:
            return self._settle(batch)
        with self._mutex:
            lost, self._lost = self._lost, Counter()
        now_s = self._now()
        heartbeat_due = now_s >= writer.next_heartbeat_s
        written: Written | None = None
        opened: Store | None = None
        try:
            opened = self._current_database(lost)
            self._make_room(opened, sum(item.num_rows for item in batch))
            with opened.transaction() as connection:
                written = writer.write(
                    connection, batch, lost, now_s=now_s, heartbeat=heartbeat_due, finished=finished
                )
        except Exception as error:  # the engine must continue whatever the error
            if written is not None and opened is not None and opened.confirms_commits:
                self._unconfirmed, batch, lost = (
                    UnconfirmedCommit(writer, written, batch, lost),
                    [],
                    Counter(),
                )
            return self._failed(writer, batch, lost, error)
        if heartbeat_due:
            writer.next_heartbeat_s = now_s + _HEARTBEAT_S
        self._committed(opened, UnconfirmedCommit(writer, written, batch, lost))
        return True

    def _settle(self, batch: list[Item]) -> bool:
        """Ask the database whether it has committed the transaction in doubt, before anything else is written. False if
        it cannot be asked now; the batch is back in the queue either way."""
        unconfirmed = self._unconfirmed
        assert unconfirmed is not None
        with self._mutex:
            self._items.extendleft(reversed(batch))
        try:
            opened = self._current_database(unconfirmed.lost)
            with opened.transaction() as connection:
                was_committed = unconfirmed.run.was_committed(connection, unconfirmed.written)
        except Exception as error:  # the engine must continue whatever the error
            self._failed(unconfirmed.run, [], Counter(), error)
            return False
        self._unconfirmed = None
        if was_committed:
            self._committed(opened, unconfirmed)
            return True
        with self._mutex:
            self._items.extendleft(reversed(unconfirmed.batch))
            self._lost.update(unconfirmed.lost)
        return True

    def _committed(self, opened: Store, done: UnconfirmedCommit) -> None:
        """Update the state after the transaction was committed."""
        written = done.written
        done.run.committed(written)
        run = next(number for number, writer in self._runs.items() if writer is done.run)
        recorded = dict(self._run_ids)
        if written.run_id is not None:
            recorded[run] = written.run_id
        if done.run.is_over:
            del self._runs[run]
            recorded.pop(run, None)
        if recorded != self._run_ids:
            self._run_ids = recorded
            opened.record_runs(set(recorded.values()))
        self._pause_s = 0.0
        with self._mutex:
            self._queued_rows -= sum(item.num_rows for item in done.batch)
            self._num_written += written.rows.total()
            for kind, count in written.orphans.items():
                self._count_lost(kind, "queue", count)
            if written.run_id is None:
                self._lost.update(done.lost)
            recovered, self._last_error = self._last_error is not None, None
        if recovered:
            _log.warning(
                "telemetry is being written again; %d events were lost so far", self._dropped.total()
            )

    def _current_database(self, lost: Losses) -> Store:
        """The open database; a new one if its file was deleted or replaced. Raises ConfigError if none can be
        opened."""
        if self._database is not None and self._database.is_gone():
            self._database.close_gone()
            self._database, self._run_ids = None, {}
            gone: Counter[str] = Counter()
            for writer in self._runs.values():
                of_run, losses = writer.forget()
                gone += of_run
                lost.update(losses)
            with self._mutex:
                self._dropped["database"] += gone.total()
            lost.update({(kind, "database"): count for kind, count in gone.items()})
            _log.error(
                "telemetry database %s was deleted or replaced while it was being written: its %d events of "
                "this run count as lost; a new file is created",
                self._label,
                gone.total(),
            )
        if self._database is None:
            self._database = stores.open_for_writing(self.url)
            if self.wants_text:
                stores.make_private(self.url)
            self._database.prepare(self._budget)
        return self._database

    def _make_room(self, opened: Store, num_rows: int) -> None:
        self._unchecked_rows -= num_rows
        if self._unchecked_rows > 0:
            return
        room = opened.make_room(self._budget)
        if room.num_removed and not self._has_trimmed:
            self._has_trimmed = True
            _log.info(
                "the telemetry database has reached %.1f MB (--telemetry-max-bytes): its oldest rows are removed from "
                "now on",
                self._budget.max_bytes / 1e6,
            )
        if not room.fits:
            raise _NoRoomError(
                f"{opened.label} and its log have reached --telemetry-max-bytes and a reader keeps the log from being "
                "emptied; end the program that holds a transaction on it open"
            )
        self._unchecked_rows = room.unchecked_rows

    def _failed(self, run: RunWriter, batch: list[Item], lost: Losses, error: Exception) -> bool:
        cause = getattr(error, "orig", None) or error
        is_transient = isinstance(error, ConfigError | _NoRoomError) or (
            self._database is not None and self._database.is_transient(error)
        )
        with self._mutex:
            self._lost.update(lost)
            if is_transient:
                self._items.extendleft(reversed(batch))
            else:
                self._discard(batch)
            first, self._last_error = self._last_error is None, " ".join(str(cause).split())
        run.next_heartbeat_s = self._now() + _HEARTBEAT_S
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S) if is_transient else 0.0
        if first:
            _log.error(
                "telemetry is not being written: %s; the engine continues, lost events are counted",
                self._last_error,
            )
        return not is_transient

    def _discard_queue(self) -> None:
        """Count the rows still unwritten at the end as lost."""
        with self._mutex:
            num_rows = self._queued_rows
            if self._unconfirmed is not None:
                self._discard(self._unconfirmed.batch)
                self._unconfirmed = None
            self._discard(list(self._items))
            self._items.clear()
        if num_rows:
            _log.error(
                "%d queued telemetry events could not be written before the end and are lost", num_rows
            )

    def _discard(self, batch: list[Item]) -> None:
        """Count the batch as lost. Call with the mutex held."""
        for item in batch:
            self._queued_rows -= item.num_rows
            if item.num_rows:
                self._count_lost(item.kind, "database", item.num_rows)


def _shed(items: deque[Item], num_rows: int) -> int:
    """Remove queued cache events, oldest first, until there is room for so many rows. Returns how many were removed."""
    shed = 0
    kept: list[Item] = []
    while items and shed < num_rows:
        item = items.popleft()
        if item.kind == _SHED_FIRST:
            shed += item.num_rows
        else:
            kept.append(item)
    items.extendleft(reversed(kept))
    return shed


def open_sink(
    url: str | None,
    *,
    level: TelemetryLevel = "expert",
    max_queued_rows: int = MAX_QUEUED_ROWS,
    max_bytes: int = MAX_DATABASE_BYTES,
    text: bool = False,
    now: Callable[[], float] = time.time,
) -> TelemetrySink:
    """The sink for a telemetry URL; None or an empty URL means no telemetry. `level`: what is recorded; `text`: record
    answers' texts too; `now` returns Unix time.

    The database and its log stay within `max_bytes` together: the oldest rows are removed (see `retention`).

    Raises ConfigError, with the remedy, if the URL is bad, its directory is missing, or the file cannot be written, is
    being written by another process, or holds anything but this version's tables.
    """
    if not url:
        return TelemetrySink()
    sink = DatabaseSink(
        url,
        level=level,
        max_queued_rows=max_queued_rows,
        max_bytes=max_bytes,
        now=now,
    )
    if text:
        stores.make_private(url)
    sink.wants_text = text
    return sink
