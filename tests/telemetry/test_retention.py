"""The database and its log stay within the limit, whatever is written and while readers are open."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.request_record import RequestRecord
from twofold.api.types import StepRecord
from twofold.telemetry.sink import CACHE_EVENT_DTYPE, TOKEN_LAYER_DTYPE, UPLOAD_DTYPE, LoadSample
from twofold.telemetry.summary import summarise
from twofold.telemetry.writer import DatabaseSink

from tests.dashboard.synthetic_run import ManualClock, run_info
from tests.e2e.waiting import wait_until
from tests.telemetry.records import open_writer, scalar, url_of

LAYERS, EXPERTS, TOP_K = 24, 64, 8


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, Path(f"{path}-wal")) if file.exists())


class Load:
    """Steps of decoding requests, one every `seconds` of a made-up clock, with everything that comes with them."""

    def __init__(self, sink: DatabaseSink, clock: ManualClock, batch: int = 8) -> None:
        self.sink, self.clock, self.batch, self.step, self.num_rows = sink, clock, batch, 0, 0
        self.rng = np.random.default_rng(0)
        sink.begin_run(
            run_info(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, num_slots=LAYERS * EXPERTS // 4)
        )

    def run(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            batch = self.batch
            rows = np.zeros(batch * LAYERS, TOKEN_LAYER_DTYPE)
            rows["step"], rows["request"] = self.step, np.tile(np.arange(batch), LAYERS) + self.step // 50 * 8
            rows["layer"], rows["num_routed"] = np.repeat(np.arange(LAYERS), batch), TOP_K
            rows["num_hits"], rows["num_cpu"] = 5, 3
            rows["experts"] = self.rng.integers(0, EXPERTS, rows["experts"].shape)
            rows["weights"] = self.rng.random(rows["weights"].shape)
            self.sink.native_events("token_layer", rows)
            for dtype, kind in ((UPLOAD_DTYPE, "upload"), (CACHE_EVENT_DTYPE, "cache_event")):
                events = np.zeros(10, dtype)
                events["step"] = self.step
                self.sink.native_events(kind, events)
            self.sink.step(StepRecord(self.step, self.clock.now_s, 0, 8, 8, 0, 1.0, 1.0))
            self.sink.request(
                RequestRecord(
                    self.step, f"chatcmpl-{self.step}", "chat", self.clock.now_s, None, None, 9, 9, "stop"
                )
            )
            self.num_rows += len(rows) + 22
            self.step += 1
            self.clock.now_s += seconds

    def written(self) -> None:
        wait_until(lambda: self.sink.stats().num_queued == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "batch", "steps"), [(4_000_000, 1, 50), (16_777_216, 8, 30)])
def test_file_and_log_stay_within_the_limit_over_many_hours(
    tmp_path: Path, limit: int, batch: int, steps: int
) -> None:
    """One request a step makes as many sums as details, eight make mostly details."""
    path, clock = tmp_path / "t.db", ManualClock()
    sink = open_writer(path, max_bytes=limit, now=clock)
    load = Load(sink, clock, batch)
    sizes = []
    for _ in range(40):
        load.run(steps, seconds=60.0)
        load.written()
        sizes.append(size_of(path))
    hours = (clock.now_s - 1_700_000_000.0) / 3600
    sink.close()
    sizes.append(size_of(path))
    assert hours >= 20
    assert max(sizes) <= limit
    # The limit was reached, and what there is room for is kept.
    assert scalar(path, "SELECT min(step) FROM step") > 0
    assert (scalar(path, "SELECT min(at_s) FROM layer_second") > 1_700_000_000) == (batch == 1)
    assert max(sizes) > 0.6 * limit
    assert scalar(path, "SELECT max(step) FROM token_layer") == load.step - 1
    assert sink.stats().num_dropped == 0
    # What the run summed up to is not forgotten with its details.
    summary = summarise(url_of(path))
    assert (summary["steps"], summary["hits"]) == (load.step, load.step * batch * LAYERS * 5)
    assert (summary["uploads"], summary["dropped_events"]) == (load.step * 10, {})
    assert scalar(path, "PRAGMA integrity_check") == "ok"


def test_a_reader_that_holds_an_old_state_bounds_what_is_written_not_the_file(tmp_path: Path) -> None:
    """The log cannot be emptied under a reader: rows wait in the queue until it is gone."""
    path, clock, limit = tmp_path / "t.db", ManualClock(), 4_000_000
    sink = open_writer(path, max_bytes=limit, now=clock)
    load = Load(sink, clock)
    load.run(20, seconds=1.0)
    load.written()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM step").fetchone()
    load.run(200, seconds=1.0)
    wait_until(lambda: "a reader keeps the log" in (sink.stats().last_error or ""))
    assert size_of(path) <= limit
    assert sink.stats().num_queued > 0
    reader.execute("COMMIT")
    reader.close()
    load.written()
    sink.close()
    assert size_of(path) <= limit
    assert sink.stats().num_dropped == 0
    assert sink.stats().num_written == load.num_rows


@pytest.mark.slow
def test_a_lower_limit_shrinks_the_file(tmp_path: Path) -> None:
    path, clock = tmp_path / "t.db", ManualClock()
    sink = open_writer(path, now=clock)
    load = Load(sink, clock)
    load.run(300, seconds=1.0)
    sink.close()
    before, limit = size_of(path), 3_000_000
    assert before > 2 * limit
    sink = open_writer(path, max_bytes=limit, now=clock)
    load = Load(sink, clock)

    def shrunk() -> bool:
        load.run(1, seconds=2.0)
        return size_of(path) <= limit

    wait_until(shrunk)
    sink.close()
    assert size_of(path) <= limit
    assert scalar(path, "PRAGMA integrity_check") == "ok"


@pytest.mark.slow
def test_shrinking_stops_neither_writer_nor_readers(tmp_path: Path) -> None:
    """Prints the longest push, query and pause between two transactions while a file shrinks to a fifth."""
    path, clock = tmp_path / "t.db", ManualClock()
    sink = open_writer(path, now=clock, max_queued_rows=1 << 20)
    Load(sink, clock).run(4_000, seconds=1.0)
    sink.close()
    before, limit = size_of(path), size_of(path) // 5
    sink = open_writer(path, max_bytes=limit, now=clock)
    load = Load(sink, clock)
    reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    longest = {"push": 0.0, "query": 0.0, "pause": 0.0}
    written, written_s = sink.stats().num_written, time.perf_counter()

    def shrunk() -> bool:
        nonlocal written, written_s
        begun_s = time.perf_counter()
        load.run(1, seconds=2.0)
        pushed_s = time.perf_counter()
        reader.execute("SELECT max(step), count(*) FROM step").fetchone()
        now_s = time.perf_counter()
        if sink.stats().num_written != written:
            written, written_s = sink.stats().num_written, now_s
        for name, took_s in (
            ("push", pushed_s - begun_s),
            ("query", now_s - pushed_s),
            ("pause", now_s - written_s),
        ):
            longest[name] = max(longest[name], took_s)
        return size_of(path) <= limit

    wait_until(shrunk)
    reader.close()
    sink.close()
    shown = ", ".join(f"{name} {1e3 * took_s:.0f} ms" for name, took_s in longest.items())
    print(f"\n{before / 1e6:.0f} MB to {limit / 1e6:.0f} MB, longest: {shown}; load {os.getloadavg()[0]:.1f}")
    assert sink.stats().num_dropped == 0
    assert longest["push"] < 0.5
    assert longest["query"] < 1.0
    assert longest["pause"] < 3.0


def test_requests_and_samples_go_when_nothing_else_is_left(tmp_path: Path) -> None:
    path, limit = tmp_path / "t.db", 2_000_000
    sink = open_writer(path, max_bytes=limit)
    sink.begin_run(run_info())
    for number in range(8_000):
        sink.request(RequestRecord(number, f"chatcmpl-{number:032}", "chat", 1.0, None, None, 9, 9, "stop"))
    sink.load_samples([LoadSample("lt", 1.0, 1, 1, 1.0, False, error="e" * 200)] * 4_000)
    sink.close()
    assert sink.stats().num_dropped == 0
    assert size_of(path) <= limit
    assert scalar(path, "SELECT max(number) FROM request") == 7_999
    assert scalar(path, "SELECT min(number) FROM request") > 0


def test_the_setting_has_a_least_value() -> None:
    with pytest.raises(ConfigError, match="--telemetry-max-bytes"):
        TelemetryConfig(telemetry_max_bytes=1_000_000)
