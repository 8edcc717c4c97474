"""The Compare page: differences of two runs and their confidence."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry import queries
from twofold.telemetry.sink import RunLabel
from twofold.telemetry.writer import open_sink

from dashboard import formats
from dashboard.figures import comparison as figures
from tests.dashboard.app_pages import link, show, texts, write_database
from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history


def test_an_interval_is_the_one_that_all_resamples_give() -> None:
    """By hand: 2 and 4 draw the means 2, 3, 3, 4 alike often; from 10 and 10 they leave 6 to 8."""
    found = queries.difference(np.array([2.0, 4.0]), np.array([10.0, 10.0]))
    assert found is not None
    assert (found.first, found.second, found.low, found.high) == (3.0, 10.0, 6.0, 8.0)
    assert found.is_clear
    assert found.change == pytest.approx(7 / 3)
    # Every resample of five values is enumerated: 5**5 means.
    first, second = np.array([1.0, 2.0, 4.0, 8.0, 9.0]), np.array([3.0, 3.0, 3.0])
    means = np.array([np.mean(drawn) for drawn in itertools.product(first, repeat=5)])
    low, high = np.quantile(3.0 - means, (0.025, 0.975))
    found = queries.difference(first, second)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(low, abs=0.3), pytest.approx(high, abs=0.3))
    assert not found.is_clear


def test_intervals_have_their_nominal_coverage() -> None:
    random = np.random.default_rng(3)
    drawn = [(random.exponential(2.0, 60), random.exponential(2.5, 60)) for _ in range(200)]
    found = [queries.difference(first, second) for first, second in drawn]
    held = np.mean([each is not None and each.low <= 0.5 <= each.high for each in found])
    assert 0.88 <= held <= 0.99


def test_too_few_samples_give_no_interval() -> None:
    assert queries.difference(np.array([1.0, np.nan]), np.array([1.0, 2.0])) is None


def test_two_runs_are_compared_by_their_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    write_database(path, "cuda:0", seconds=4)
    assert "one run" in texts(show(monkeypatch, path, "compare"))
    write_database(path, "none", seconds=8)
    write_database(path, "emulated:rtx3060-pcie3", seconds=6)
    app = show(monkeypatch, path, "compare")
    assert "Run 3 against run 2" in texts(app)
    assert "One of the two runs is emulated" in texts(app)
    app = show(monkeypatch, path, "compare", run="2", other="1")
    text = texts(app)
    assert "Run 2 against run 1" in text
    db = queries.open_database(f"sqlite:///{path}")
    found = {run.run_id: run for run in queries.runs(db)}
    e2e = [queries.client_times(db, found[number], queries.window(found[number])).e2e_s for number in (1, 2)]
    expected = queries.difference(*e2e)
    assert expected is not None
    row = f"E2E (n = {len(e2e[0])} and {len(e2e[1])})</td><td>{formats.seconds(expected.first)}</td>"
    assert row in text
    assert '">num_slots</td><td>48</td><td>0</td>' in text
    assert "too few samples" in text, "a run without slots has no hit rate"


def test_up_to_eight_runs_are_compared_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    for number in range(1, 10):
        sink = open_sink(f"sqlite:///{path}", now=(clock := ManualClock(1.7e9 + 1000 * number)))
        sink.label = RunLabel(f"name-{number}", "baseline,cold" if number == 1 else "")
        synthetic_history(
            sink, clock, seconds=2 + number % 3, info=run_info("none", num_slots=0)
        ).sink.close()
    app = show(monkeypatch, path, "compare", run="9", other="1,3,11")
    assert "Run 11 is not in this database" in texts(app)
    (box,) = app.multiselect
    assert [option for option in box.options if "#baseline #cold" in option] == [
        option for option in box.options if option.startswith("1 · name-1 · ")
    ]
    text = texts(app)
    assert "Run 9 against run 1," in text
    assert "Run 9 against run 3," in text
    assert "Run 9 against run 8," not in text
    db = queries.open_database(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        for number, tags in ((1, "baseline cold"), (3, "–"), (9, "–")):
            query = """SELECT count(*), avg(finished_s - received_s) FROM request WHERE run_id = ?
                       AND finish_reason IN ('stop', 'length')"""
            count, e2e_s = connection.execute(query, (number,)).fetchone()
            start = f'<td class="tf-text">run {number} name-{number}</td><td class="tf-text">{tags}</td>'
            row = text.partition(start)[2].partition("</tr>")[0]
            assert row.startswith(f"<td>{count}</td>")
            assert f"<td>{formats.seconds(e2e_s)}</td>" in row
    box.set_value(list(range(8, 1, -1))).run()
    assert not app.exception
    assert texts(app).count("<caption>Run 9 against run") == 7
    assert link(app, "other") == "8,7,6,5,4,3,2"
    assert len(queries.runs(db)) == 9
    chart = figures.cumulative({number: np.arange(1.0, 4.0) for number in range(8)}).built()
    assert len({(trace.line.color, trace.line.dash) for trace in chart.data}) == 8
