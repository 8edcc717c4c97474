"""Speculative decoding on the pages Scheduler and Requests, and its queries: worked out by hand from written steps."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from twofold.api.request_record import RequestRecord
from twofold.api.types import StepRecord
from twofold.telemetry import queries
from twofold.telemetry.sink import TelemetrySink
from twofold.telemetry.summary import summarise
from twofold.telemetry.writer import open_sink

from dashboard import formats
from tests.dashboard.app_pages import metrics, show, texts
from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history

# (drafted, accepted) of decode steps, in turn
PLAYED = [(3, 3), (3, 1), (0, 0), (2, 2), (2, 0)]


class Drafting(TelemetrySink):
    """Passes on a run as if every decode step had one sequence, and drafts in the turn of PLAYED."""

    def __init__(self, sink: TelemetrySink) -> None:
        self.begin_run, self.native_events, self.close = sink.begin_run, sink.native_events, sink.close  # type: ignore[method-assign]
        self._sink = sink
        self.played: list[tuple[int, int]] = []

    def step(self, record: StepRecord) -> None:
        if record.num_prefill_tokens == 0:
            drafted, accepted = PLAYED[len(self.played) % len(PLAYED)]
            self.played.append((drafted, accepted))
            record = record._replace(
                num_running=1,
                num_decode_tokens=1 + drafted,
                num_drafted_tokens=drafted,
                num_accepted_tokens=accepted,
                predicted_us=record.step_us / 2 if drafted else 0.0,
            )
        self._sink.step(record)

    def request(self, record: RequestRecord) -> None:
        adapter = "style" if record.number % 2 else ""
        self._sink.request(replace(record, accepted_tokens=record.number, rejected_tokens=5, adapter=adapter))


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Drafting]:
    path, clock = tmp_path_factory.mktemp("drafted") / "t.db", ManualClock()
    sink = Drafting(open_sink(f"sqlite:///{path}", now=clock))
    synthetic_history(sink, clock, seconds=8, info=run_info("cuda:0"))
    sink.close()
    return path, sink


def test_acceptance_by_position(drafted: tuple[Path, Drafting]) -> None:
    path, sink = drafted
    db = queries.open_database(f"sqlite:///{path}")
    (run,) = queries.runs(db)
    found = queries.draft_acceptance(db, run)
    steps = queries.draft_steps(db, run, queries.window(run))
    count = {pair: sink.played.count(pair) for pair in PLAYED}
    threes, ones, twos, none = count[3, 3], count[3, 1], count[2, 2], count[2, 0]
    assert found == [
        (threes + ones + twos, threes + ones + twos + none),
        (threes + twos, threes + ones + twos),
        (threes, threes),
    ]
    assert [
        (int(depth), int(got) - 1) for depth, got in zip(steps.depth, steps.yielded, strict=True)
    ] == sink.played
    assert steps.predicted_us == pytest.approx(steps.step_us / 2 * (steps.depth > 0))


def test_rejected_drafts_are_not_decoded_tokens(
    monkeypatch: pytest.MonkeyPatch, drafted: tuple[Path, Drafting]
) -> None:
    path, sink = drafted
    with sqlite3.connect(path) as connection:
        ((wall_us, beside_prefill),) = connection.execute(
            "SELECT sum(wall_us) FILTER (WHERE num_prefill_tokens = 0), "
            "sum(num_decode_tokens) FILTER (WHERE num_prefill_tokens > 0) FROM step"
        )
    decoded = sum(1 + accepted for _, accepted in sink.played)
    app = show(monkeypatch, path, window="all")
    assert metrics(app)["Decode tokens/s"] == formats.rate(decoded / wall_us * 1e6)
    assert f"{decoded + beside_prefill:,} decode tokens" in texts(app)
    assert summarise(f"sqlite:///{path}")["decode_tokens"] == decoded + beside_prefill, "the writer's totals"


def test_pages_show_drafts(monkeypatch: pytest.MonkeyPatch, drafted: tuple[Path, Drafting]) -> None:
    path, sink = drafted
    app = show(monkeypatch, path, "scheduler")
    num_drafted, num_accepted = map(sum, zip(*sink.played, strict=True))
    assert metrics(app)["Drafts accepted"] == f"{num_accepted / num_drafted:.1%}"
    assert len(app.get("plotly_chart")) == 7
    assert "has the median 2.00" in texts(app)
    app = show(monkeypatch, path, "requests")
    table = app.dataframe[0].value
    assert table["accepted"].tolist() == table["number"].tolist()
    assert set(table["rejected"]) == {5}
    assert int(metrics(app)["Drafts accepted"]) in table["number"].tolist()


def test_requests_are_found_by_their_adapter(
    monkeypatch: pytest.MonkeyPatch, drafted: tuple[Path, Drafting]
) -> None:
    app = show(monkeypatch, drafted[0], "requests")
    app.text_input[0].set_value("style").run()
    table = app.dataframe[0].value
    assert set(table["adapter"]) == {"style"}
    assert len(table)
    assert all(number % 2 for number in table["number"])
