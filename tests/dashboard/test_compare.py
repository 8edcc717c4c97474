"""The Compare page: differences of two runs and their confidence."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry import queries

from dashboard import formats
from tests.dashboard.app_pages import show, texts, write_database


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
