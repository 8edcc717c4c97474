"""Rows lost under each fault, as a table: pytest -m slow tests/telemetry/test_fault_table.py -s"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from twofold.api.errors import ConfigError
from twofold.telemetry import queries
from twofold.telemetry.writer import DatabaseSink, open_sink

from tests.dashboard.synthetic_run import run_info
from tests.e2e.waiting import wait_until
from tests.telemetry.old_files import VERSIONS, old_file
from tests.telemetry.postgres_server import PostgresServer, running_server
from tests.telemetry.records import scalar, step_record, token_layers, url_of

STEPS_PER_S = 200
EVENTS_PER_STEP = 60
NUM_KILLS = 50

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("postgres")]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    fault: str
    offered: int
    lost: int
    counted: int
    """Lost events that the run itself counts."""
    remark: str

    def __str__(self) -> str:
        return f"| {self.fault} | {self.offered:,} | {self.lost:,} | {self.counted:,} | {self.remark} |"


class Load(threading.Thread):
    """Steps with their events at a steady rate, until stopped."""

    def __init__(self, sink: DatabaseSink, reported: Callable[[int], object] = lambda step: None) -> None:
        super().__init__(daemon=True)
        self._sink, self._reported = sink, reported
        self._ended = threading.Event()
        self.num_steps = 0
        self.longest_push_s = 0.0

    def run(self) -> None:
        self._sink.begin_run(run_info())
        begun_s = time.perf_counter()
        while not self._ended.is_set():
            pushing_s = time.perf_counter()
            self._sink.step(step_record(self.num_steps))
            self._sink.native_events("token_layer", token_layers(EVENTS_PER_STEP, step=self.num_steps))
            self.longest_push_s = max(self.longest_push_s, time.perf_counter() - pushing_s)
            self.num_steps += 1
            self._reported(self.num_steps)
            due_s = begun_s + self.num_steps / STEPS_PER_S
            self._ended.wait(max(0.0, due_s - time.perf_counter()))

    def stop(self) -> int:
        """Steps pushed."""
        self._ended.set()
        self.join(timeout=60)
        return self.num_steps


def stored_rows(url: str) -> int:
    """Steps and events in the database, of all runs."""
    db = queries.open_database(url)
    return sum(
        queries.step_totals(db, run).num_steps + len(queries.events(db, run, "token_layer"))
        for run in queries.runs(db)
    )


def under_load(fault: str, url: str, harm: Callable[[], object], remark: str) -> Row:
    """Offer load for a second, do harm, offer load for another second."""
    sink = open_sink(url)
    assert isinstance(sink, DatabaseSink)
    load = Load(sink)
    load.start()
    wait_until(lambda: sink.stats().num_written > 0)
    harm()
    written = sink.stats().num_written
    wait_until(lambda: sink.stats().num_written > written)
    offered = load.stop() * (1 + EVENTS_PER_STEP)
    sink.close()
    lost = offered - stored_rows(url)
    return Row(
        fault,
        offered,
        lost,
        sink.stats().num_dropped,
        f"{remark}; longest push {load.longest_push_s * 1e3:.1f} ms",
    )


def _child(url: str, pipe: int) -> None:
    sink = open_sink(url)
    assert isinstance(sink, DatabaseSink)
    Load(sink, lambda step: os.write(pipe, b"%d\n" % step)).run()


def killed(path: Path, url: str) -> Row:
    """Kills a server's process at random moments; the same database each time."""
    draw, offered, worst, before = random.Random(0), 0, 0, 0
    lost_total = 0
    for _ in range(NUM_KILLS):
        reading, writing = os.pipe()
        child = multiprocessing.get_context("fork").Process(target=_child, args=(url, writing))
        child.start()
        os.close(writing)
        pushed = b""
        deadline_s: float | None = None
        while deadline_s is None or time.monotonic() < deadline_s:
            pushed += os.read(reading, 4096)
            deadline_s = deadline_s or time.monotonic() + draw.uniform(0.3, 0.9)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(timeout=60)
        while part := os.read(reading, 65536):
            pushed += part
        os.close(reading)
        num_steps = int(pushed.split()[-1])
        stored = stored_rows(url)
        lost = num_steps * (1 + EVENTS_PER_STEP) - (stored - before)
        before = stored
        offered += num_steps * (1 + EVENTS_PER_STEP)
        lost_total += lost
        worst = max(worst, lost)
        if path.suffix == ".db":
            assert scalar(path, "PRAGMA integrity_check") == "ok"
    worst_s = worst / (1 + EVENTS_PER_STEP) / STEPS_PER_S
    assert 0 <= lost_total <= offered
    return Row(
        f"kill -9, {NUM_KILLS} times",
        offered,
        lost_total,
        0,
        f"at most the last {worst_s:.2f} s; file intact",
    )


@contextmanager
def no_larger_files(num_bytes: int) -> Iterator[None]:
    """This process cannot write beyond that size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(path: Path) -> None:
    with no_larger_files(os.stat(path).st_size + 1):
        time.sleep(2)


def held(path: Path) -> None:
    other = sqlite3.connect(path, timeout=10, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    time.sleep(2)
    other.close()


def refused(fault: str, open_it: Callable[[], object]) -> Row:
    with pytest.raises(ConfigError) as error:
        open_it()
    assert "\n" not in str(error.value)
    return Row(fault, 0, 0, 0, "refused at start, in one line")


def upgraded(folder: Path, version: int) -> Row:
    path = old_file(folder / f"v{version}.db", version)
    old = sum(int(str(scalar(path, f"SELECT count(*) FROM {t}"))) for t in ("step", "token_layer"))
    open_sink(url_of(path)).close()
    return Row(
        f"file of schema version {version}", old, old - stored_rows(url_of(path)), 0, "upgraded at start"
    )


def test_the_table(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    url = url_of(path)
    table = [killed(path, url)]
    full, locked, gone = (tmp_path / name for name in ("full.db", "locked.db", "gone.db"))
    table += [
        under_load("disk full for 2 s", url_of(full), lambda: full_disk(full), "rows wait"),
        under_load("locked for 2 s", url_of(locked), lambda: held(locked), "rows wait"),
        under_load("file deleted", url_of(gone), gone.unlink, "a new file is begun"),
    ]
    sink = open_sink(url)
    table.append(refused("second server on the file", lambda: open_sink(url)))
    sink.close()
    path.chmod(0o444)
    table.append(refused("file read-only", lambda: open_sink(url)))
    table += [upgraded(tmp_path, version) for version in VERSIONS]
    show("SQLite", table)
    for row in table[1:3] + table[4:]:
        assert row.lost == 0, row
    assert table[3].lost == table[3].counted > 0


def restart(server: PostgresServer, mode: str) -> None:
    server.stop(mode)
    time.sleep(2)
    server.start()


def test_the_table_of_postgresql(tmp_path: Path) -> None:
    with running_server() as server:
        urls = {name: server.new_database(name) for name in ("killed", "crash", "stop", "ended")}
        end_connections = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = 'ended' AND pid <> pg_backend_pid()"
        )
        table = [
            killed(tmp_path, urls["killed"]),
            under_load("server crashes, 2 s away", urls["crash"], lambda: restart(server, "immediate"), "rows wait"),
            under_load("server restarts, 2 s away", urls["stop"], lambda: restart(server, "fast"), "rows wait"),
            under_load("connections ended", urls["ended"], lambda: server.sql("ended", end_connections), "rows wait"),
        ]  # fmt: skip
    show("PostgreSQL", table)
    for row in table[1:]:
        assert row.lost == row.counted == 0, row


def show(database: str, table: list[Row]) -> None:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{database}: {STEPS_PER_S} steps/s of {EVENTS_PER_STEP} events; load average {load}")
    print("| fault | offered | lost | counted | remark |\n|---|---|---|---|---|")
    print("\n".join(map(str, table)))
