"""Telemetry in /health and /metrics, and what they leave out where no expert is on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_engine import EMULATED, FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app
from twofold.telemetry.routing import RoutingRecorder
from twofold.telemetry.sink import SinkStats, TeeSink, TelemetrySink

LABELS = 'model_name="fake-tales"'
LOST = {"ring": 3, "queue": 40, "database": 500}


class StatsSink(TelemetrySink):
    def __init__(self, error: str | None) -> None:
        self.error = error

    def stats(self) -> SinkStats:
        return SinkStats(level="expert", num_written=1000, num_queued=7, dropped=LOST, last_error=self.error)


def metrics_of(url: str) -> dict[str, float]:
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")
    }


@pytest.mark.parametrize("error", [None, "database is locked"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_losses_and_a_broken_database_are_reported(
    engine: FakeEngine, error: str | None, wrapped: bool, tmp_path: Path
) -> None:
    sink: TelemetrySink = StatsSink(error)
    if wrapped:
        sink = TeeSink(RoutingRecorder(tmp_path / "routing.npz"), sink)
    with serving(create_app(engine, ServerConfig(), sink)) as url:
        health = HTTP.get(f"{url}/health")
        metrics = metrics_of(url)
    assert health.status_code == 200, "answers do not depend on telemetry"
    assert health.json()["telemetry"] == {
        "state": "recording" if error is None else "failing",
        "level": "expert",
        "events_written": 1000,
        "events_queued": 7,
        "events_lost": LOST,
    }
    assert metrics[f"twofold:telemetry_recording{{{LABELS}}}"] == (error is None)
    assert metrics[f"twofold:telemetry_level{{{LABELS}}}"] == 3
    for place, count in LOST.items():
        assert metrics[f'twofold:telemetry_events_lost_total{{{LABELS},place="{place}"}}'] == count


def test_without_telemetry_it_is_off(url: str) -> None:
    assert HTTP.get(f"{url}/health").json()["telemetry"] == {"state": "off"}
    assert not [name for name in metrics_of(url) if name.startswith("twofold:telemetry")]


@pytest.mark.parametrize("changes", [(), ("expert deferral: …",)])
def test_deferred_experts_are_counted_where_something_changes_answers(changes: tuple[str, ...]) -> None:
    engine = FakeEngine(info=dataclasses.replace(EMULATED, output_changes=changes))
    try:
        with serving(create_app(engine, ServerConfig())) as url:
            metrics = metrics_of(url)
    finally:
        engine.close()
    named = {name.partition("{")[0] for name in metrics}
    assert ("twofold:expert_deferred_total" in named) == bool(changes)


@pytest.mark.parametrize("num_slots", [0, 2])
def test_without_slots_there_is_no_policy_and_nothing_that_could_be_a_hit_rate(num_slots: int) -> None:
    info = dataclasses.replace(EMULATED, num_slots=num_slots)
    engine = FakeEngine(info=info)
    try:
        with serving(create_app(engine, ServerConfig())) as url:
            health, metrics = HTTP.get(f"{url}/health").json(), metrics_of(url)
    finally:
        engine.close()
    assert health["policy"] == ("lru" if num_slots else None)
    named = {name.partition("{")[0] for name in metrics}
    assert "twofold:expert_cpu_misses_total" in named
    for name in ("expert_hits", "expert_fetched", "expert_uploads", "expert_evictions", "h2d_bytes"):
        assert (f"twofold:{name}_total" in named) == bool(num_slots)
    assert ("twofold:expert_hit_rate" in named) == bool(num_slots)
