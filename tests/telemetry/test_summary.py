"""`twofold telemetry summary`: outcomes of requests, runs without a GPU, and its cost for long runs."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import event
from twofold.api.request_record import RequestRecord
from twofold.api.types import StepRecord
from twofold.telemetry import queries
from twofold.telemetry.queries import estimates
from twofold.telemetry.sink import CACHE_EVENT_DTYPE, TOKEN_LAYER_DTYPE, UPLOAD_DTYPE
from twofold.telemetry.summary import format_summary, summarise
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, run_info
from tests.telemetry import table_queries

LAYERS = 48


def record(path: Path, num_steps: int, *, accelerator: str = "emulated:rtx4090-pcie4", batch: int = 8) -> str:
    """A run whose steps decode `batch` requests; each step has 48 × batch rows."""
    url, clock = f"sqlite:///{path}", ManualClock()
    sink = open_sink(url, max_queued_rows=10**9, now=clock)
    slots = 0 if accelerator == "none" else 100
    sink.begin_run(run_info(accelerator, num_layers=LAYERS, num_experts=128, top_k=8, num_slots=slots))
    rows = np.zeros(LAYERS * batch, TOKEN_LAYER_DTYPE)
    rows["layer"], rows["request"] = np.repeat(np.arange(LAYERS), batch), np.tile(np.arange(batch), LAYERS)
    rows["num_routed"], rows["num_cpu"] = 8, 8
    rows["layer_us"], rows["predicted_us"] = 100.0, 90.0
    uploads, events = np.zeros(4, UPLOAD_DTYPE), np.zeros(4, CACHE_EVENT_DTYPE)
    for step in range(num_steps):
        rows["step"] = uploads["step"] = events["step"] = step
        sink.native_events("token_layer", rows)
        if slots:
            sink.native_events("upload", uploads)
            sink.native_events("cache_event", events)
        sink.step(StepRecord(step, clock.now_s, 0, batch, batch, 0, 10.0, 10.0))
        clock.now_s += 0.1
    sink.close()
    return url


def test_answers_are_counted_by_their_outcome(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    sink = open_sink(url)
    sink.begin_run(run_info())
    reasons = ["stop"] * 5 + ["length"] * 4 + ["cancelled"] * 3 + ["error"] * 2 + [None]
    for number, reason in enumerate(reasons):
        sink.request(RequestRecord(number, f"id-{number}", "chat", 1.0, None, None, 1, 1, reason))  # type: ignore[arg-type]
    sink.close()
    summary = summarise(url)
    counts = {"total": 15, "finished": 9, "failed": 2, "cancelled": 3, "unfinished": 1}
    assert summary["requests"] == counts
    assert "15: 9 finished, 2 failed, 3 cancelled, 1 unfinished" in format_summary(summary)


def test_without_an_expert_cache_there_is_no_hit_rate_and_no_policy(tmp_path: Path) -> None:
    url = record(tmp_path / "t.db", 3, accelerator="none")
    summary = summarise(url)
    assert (summary["hit_rate"], summary["policy"]) == (None, None)
    assert summary["cpu_misses"] == 3 * 8 * LAYERS * 8
    text = format_summary(summary)
    for word in ("hit rate", "policy", "uploads", "PCIe", "evictions"):
        assert word not in text
    db = queries.open_database(url)
    run = queries.runs(db)[0]
    assert table_queries.overview(db, run, queries.window(run)).totals.hit_rate is None


def work_of_summary(url: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """SQLite's virtual machine instructions, in thousands: what a summary costs however busy the machine is."""
    counted = 0

    def tick() -> int:
        nonlocal counted
        counted += 1
        return 0

    opened = queries.open_database

    def counting(url: str) -> queries.Database:
        db = opened(url)

        @event.listens_for(db.engine, "connect")
        def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
            connection.set_progress_handler(tick, 1000)

        return db

    monkeypatch.setattr(queries, "open_database", counting)
    summarise(url)
    monkeypatch.undo()
    return counted


@pytest.mark.parametrize("accelerator", ["none", "emulated:rtx4090-pcie4"])
def test_a_summary_does_not_cost_more_when_a_run_was_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    """Rows are 10 times as many; predictions are looked at in the latest rows alone."""
    short = record(tmp_path / "short.db", 12, accelerator=accelerator)
    long = record(tmp_path / "long.db", 120, accelerator=accelerator)
    works = []
    for url in (short, long):
        monkeypatch.setattr(estimates, "MAX_ROWS", 2_000)
        works.append(work_of_summary(url, monkeypatch))
    assert works[1] <= works[0] + 5


def test_estimates_of_an_older_run_are_its_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    sink = open_sink(url)
    for measured in (100.0, 180.0, 450.0):
        sink.begin_run(run_info("none"))
        rows = np.zeros(50, TOKEN_LAYER_DTYPE)
        rows["step"], rows["layer_us"], rows["predicted_us"] = np.arange(50), measured, 90.0
        sink.native_events("token_layer", rows)
    sink.begin_run(run_info("none"))
    sink.close()
    medians = [summarise(url, run_id=run_id)["prediction_error_median"] for run_id in (1, 2, 3, 4)]
    assert medians == [pytest.approx(0.1), pytest.approx(0.5), pytest.approx(0.8), None]


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["none", "emulated:rtx4090-pcie4"])
def test_a_summary_of_two_million_rows_takes_less_than_a_second(tmp_path: Path, accelerator: str) -> None:
    """pytest -m slow -s tests/telemetry/test_summary.py"""
    url = record(tmp_path / "t.db", 2_000_000 // (LAYERS * 16), accelerator=accelerator, batch=16)
    took = []
    for _ in range(3):
        begun_s = time.perf_counter()
        summary = summarise(url)
        took.append(time.perf_counter() - begun_s)
    print(f"\nsummary of {summary['cpu_misses'] // 8:,} rows, {accelerator}: {min(took):.2f} s")
    assert min(took) < 1.0
