"""The Load tests page: percentiles, failures and the test on one time axis."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

from dashboard import formats
from dashboard.figures import loadtest as figures
from tests.dashboard.app_pages import link, metrics, show, texts, write_database
from tests.dashboard.synthetic_run import ManualClock, run_info


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loadtests") / "t.db"
    write_database(path, "emulated:rtx4090-pcie4")
    return path


def test_percentiles_and_failures_are_those_of_the_samples(
    monkeypatch: pytest.MonkeyPatch, emulated: Path
) -> None:
    app = show(monkeypatch, emulated, "loadtests")
    with sqlite3.connect(emulated) as connection:
        rows = connection.execute("SELECT ttft_ms, tpot_ms, e2e_ms FROM load_sample WHERE ok").fetchall()
    text = texts(app)
    for values in np.array(rows).T:
        cells = "".join(
            f"<td>{formats.milliseconds(float(np.percentile(values, each)))}</td>" for each in (50, 95, 99)
        )
        assert cells in text
    assert metrics(app)["Failures"] == "2"
    assert metrics(app)["Answers"] == "28"
    assert '">HTTP 503</td><td>2</td>' in text


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
    assert metrics(show(monkeypatch, path, "loadtests"))["Answers"] == "8"
    app = show(monkeypatch, path, "loadtests", loadtest="lt-old")
    assert metrics(app)["Answers"] == "28"
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
