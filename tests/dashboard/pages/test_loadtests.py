"""The Load tests page: percentiles, failures and the test on one time axis."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry import queries
from twofold.telemetry.sink import parse_load_samples
from twofold.telemetry.writer import open_sink
from twofold.tools.loadgen import report
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.loadtest_plan import LoadTestPlan
from twofold.tools.loadgen.metrics import Run, Sample, span_s
from twofold.tools.loadgen.sample_store import record_of
from twofold.tools.loadgen.slo import parse_slos

from dashboard import formats
from dashboard.figures import loadtest as figures
from dashboard.loadtest_result import plan_of, result_of, samples_of
from tests.dashboard.app_pages import link, metrics, show, texts, write_database
from tests.dashboard.synthetic_run import ManualClock, run_info


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loadtests") / "t.db"
    write_database(path, "emulated:rtx4090-pcie4")
    return path


LATENCIES = {
    "TTFT": "SELECT ttft_ms FROM load_sample WHERE ok",
    "TPOT": "SELECT tpot_ms FROM load_sample WHERE ok AND NOT gave_up",
    "ITL": "SELECT value FROM load_sample, json_each(itls_json) WHERE ok",
    "E2E": "SELECT e2e_ms FROM load_sample WHERE ok AND NOT gave_up",
}
STAGES = """
    SELECT stage, name, count(*), sum(gave_up), sum(NOT ok),
           sum(completion_tokens) / (max(finished_s) - min(finished_s - e2e_ms / 1000))
    FROM load_sample GROUP BY stage, name ORDER BY min(finished_s)"""


def test_figures_are_those_of_sql(monkeypatch: pytest.MonkeyPatch, emulated: Path) -> None:
    app = show(monkeypatch, emulated, "loadtests")
    text = texts(app).replace(' class="tf-text"', "")
    with sqlite3.connect(emulated) as connection:
        for name, query in LATENCIES.items():
            values = np.array(connection.execute(query).fetchall())
            expected = [values.mean(), *np.percentile(values, (50, 90, 95, 99))]
            cells = "".join(f"<td>{formats.milliseconds(float(each))}</td>" for each in expected)
            assert f"({name})</td>{cells}" in text
        for stage, name, count, gave_up, failed, rate in connection.execute(STAGES):
            assert (
                f"<td>{stage}</td><td>{name}</td><td>{count}</td><td>{gave_up}</td><td>{failed}</td>" in text
            )
            assert f"<td>{formats.rate(rate)}</td></tr>" in text
    assert metrics(app)["Failures"] == "2"
    assert (metrics(app)["Answers"], metrics(app)["Gave up"]) == ("25", "3")
    assert ">HTTP 503</td><td>2</td>" in text
    assert "were not recorded" in text, "no plan came with the samples"
    assert "lt-1" in text


def _sample(index: int) -> Sample:
    """A request of a load test in two stages: every seventh failed, every fifth was given up."""
    draw, sent_s = np.random.default_rng(index), 100.0 + index
    failed, gave_up = index % 7 == 6, index % 5 == 4
    pieces = (sent_s + 0.05 + np.cumsum(draw.exponential(0.02, 12))).tolist()
    ended = None if failed or gave_up else pieces[-1] + 0.001
    answer = AnswerStream(sent_s, piece_s=pieces, end_s=ended, prompt_tokens=20 + index, _usage_tokens=12)
    return Sample(
        index,
        1,
        answer,
        error_kind="HTTP 503" if failed else None,
        error="busy" if failed else None,
        gave_up=gave_up and not failed,
        name="chat" if index % 2 else "agent",
        stage="ramp" if index < 20 else "hold",
        finished_s=1.7e9 + pieces[-1],
        took_ms=1e3 * (pieces[-1] + 0.001 - sent_s),
    )


def test_a_recorded_test_has_the_figures_that_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = LoadTestPlan(
        shape="ramp", mix={"chat": 3, "agent": 1}, slos=parse_slos("ttft_p95_ms=90,itl_p95_ms=5")
    )
    samples = [_sample(index) for index in range(40)]
    printed = Run(samples, span_s(samples), plan.slos)
    records = [record_of(sample, "loadtest-1") for sample in samples]
    records[0]["plan_json"] = plan.facts_json()
    path = tmp_path / "t.db"
    sink = open_sink(f"sqlite:///{path}", now=ManualClock(1_700_001_000.0))
    sink.begin_run(run_info("none", num_slots=0))
    sink.load_samples(parse_load_samples(json.loads(json.dumps({"samples": records}))))
    sink.close()
    db = queries.open_database(f"sqlite:///{path}")
    (test,) = queries.load_tests(db)
    stored = plan_of(test)
    assert (stored.shape, stored.mix, stored.slos) == ("ramp", "chat 75%, agent 25%", plan.slos)
    found = result_of(queries.load_samples(db, test.loadtest_id), stored.slos)
    assert report.table("t", found.figures, plan.slos) == report.table("t", printed.figures(), plan.slos)
    shown = Run(samples_of(queries.load_samples(db, test.loadtest_id)), found.figures["duration"])
    assert report.stage_table(shown) == report.stage_table(printed)
    assert report.objectives(found.objectives) == report.objectives([s.check(samples) for s in plan.slos])
    app = show(monkeypatch, path, "loadtests")
    figures = metrics(app)
    assert figures["Goodput"] == f"{formats.rate(printed.figures()['request_goodput'])} requests/s"
    assert figures["Answers"] == str(printed.figures()["completed"])
    text = texts(app).replace(' class="tf-text"', "")
    assert "mix: chat 75%, agent 25% · shape: ramp" in text
    for each in found.objectives:
        verdict = "met" if each.met else "missed"
        assert f"<td>{each.slo}</td><td>{formats.milliseconds(each.value_ms)}</td><td>{verdict}</td>" in text


def test_a_load_test_stands_under_the_run_it_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    write_database(path, "emulated:rtx3060-pcie3", seconds=2)
    sink = open_sink(f"sqlite:///{path}", now=ManualClock(1_700_001_000.0))
    sink.begin_run(run_info("cuda:0"))
    sink.close()
    app = show(monkeypatch, path, "loadtests")  # the newest run is the one without a load test
    assert ["emulated:rtx3060-pcie3" in warning.value for warning in app.warning] == [True]
    assert "cuda:0" not in "\n".join(element.proto.body for element in app.get("html"))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE load_sample SET run_id = NULL")
    app = show(monkeypatch, path, "loadtests")
    assert ["was not recorded" in warning.value for warning in app.warning] == [True]
    assert "accelerator" not in "\n".join(element.proto.body for element in app.get("html"))


def test_the_address_names_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    clock = ManualClock()
    write_database(path, "cuda:0", seconds=2)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE load_sample SET loadtest_id = 'lt-old', finished_s = finished_s - 500")
        connection.execute(
            "INSERT INTO load_sample SELECT * FROM load_sample WHERE rowid <= 10"  # half as many samples
        )
        connection.execute(
            "UPDATE load_sample SET loadtest_id = 'lt-new', finished_s = ? WHERE rowid > 30", (clock(),)
        )
    assert metrics(show(monkeypatch, path, "loadtests"))["Answers"] == "7"
    app = show(monkeypatch, path, "loadtests", loadtest="lt-old")
    assert metrics(app)["Answers"] == "25"
    assert link(app, "loadtest") == "lt-old"


def test_the_timeline_has_what_was_measured_and_the_stages_where_they_began(emulated: Path) -> None:
    db = queries.open_database(f"sqlite:///{emulated}")
    run = queries.runs(db)[0]
    samples = queries.load_samples(db, "lt-1")
    stage = ["ramp"] * 10 + ["hold"] * 20
    assert figures.stages(samples.finished_s, stage) == [
        ("ramp", samples.finished_s[0]),
        ("hold", samples.finished_s[10]),
    ]
    overview = queries.RunHistory(db, run).overview(queries.window(run))
    full = figures.timeline(samples, overview).built()
    assert [trace.name for trace in full.data[:2]] == ["users", "failed request"]
    np.testing.assert_array_equal(full.data[0].y, samples.num_users)
    assert len(full.data[1].x) == 2
    assert len(figures.timeline(samples, None).built().data) == len(full.data) - 2
