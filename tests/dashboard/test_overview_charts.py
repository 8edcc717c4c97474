"""Overview: KV cache, preemptions, lost steps and the hues of parts, against SQL on the same file."""

from __future__ import annotations

import json
import sqlite3
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from twofold.telemetry import queries
from twofold.telemetry.queries import gaps
from twofold.telemetry.queries.step_times import STEP_PARTS

from dashboard import palette
from dashboard.figures import times
from tests.dashboard.app_pages import show, texts, write_database
from tests.dashboard.plotly_values import values_of


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulated") / "t.db"
    write_database(path, "emulated:rtx4090-pcie4")
    return path


def spec(app: AppTest, key: str) -> dict:
    (found,) = [each for each in app.get("plotly_chart") if each.proto.id.endswith(f"-{key}")]
    return json.loads(found.proto.spec)


def test_kv_use_and_preemptions_are_sqls(monkeypatch: pytest.MonkeyPatch, emulated: Path) -> None:
    app = show(monkeypatch, emulated)
    with sqlite3.connect(emulated) as connection:
        seconds = connection.execute(
            "SELECT avg(kv_use), sum(num_preemptions) FROM step GROUP BY cast(started_s AS INTEGER) ORDER BY 1"
        ).fetchall()
    use, preempted = (values_of(spec(app, key)["data"][-1]["y"]) for key in ("kv-use", "preemptions"))
    assert sorted(use[~np.isnan(use)]) == pytest.approx([100 * share for share, _ in seconds], rel=1e-5)
    assert preempted.sum() == sum(count for _, count in seconds) > 0
    assert f"{preempted.sum():.0f} preemptions" in texts(app)
    assert "Shaded" not in texts(app)


@pytest.mark.parametrize("most", [gaps.MAX_STEPS, 40])
def test_gaps_between_tokens_are_the_ends_of_steps(
    monkeypatch: pytest.MonkeyPatch, emulated: Path, most: int
) -> None:
    monkeypatch.setattr(gaps, "MAX_STEPS", most)
    with sqlite3.connect(emulated) as connection:
        steps = connection.execute(
            "SELECT step, started_s, started_s + wall_us / 1e6, num_decode_tokens - num_drafted_tokens FROM step"
        ).fetchall()
    every = max(1, -(-len(steps) // most))
    ends = {step: end_s for step, _, end_s, _ in steps}
    at_s, gap_s = zip(
        *(
            (begun_s, end_s - ends[step - 1])
            for step, begun_s, end_s, answers in steps
            for _ in range(answers)
            if step - 1 in ends and step % every == 0
        ),
        strict=True,
    )
    assert max(answers for *_, answers in steps) > 1, "a step counts once for each answer"
    expected = queries.percentile_series(np.array(at_s), np.array(gap_s) * 1e3, max_buckets=60)
    monkeypatch.setattr("dashboard.view._shared", lambda key, compute: compute())
    app = show(monkeypatch, emulated)
    lines = spec(app, "itl")["data"]
    for line, values in zip(lines, (expected.p99, expected.p95, expected.p50), strict=True):
        assert values_of(line["y"]) == pytest.approx(values[~np.isnan(values)], rel=1e-4)
    assert (f"From one step in {every}" in texts(app)) == (every > 1)


def test_an_older_run_has_no_chart_of_its_kv_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    write_database(path, "none")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE step SET kv_use = NULL, num_preemptions = NULL")
    assert "Preemptions" not in texts(show(monkeypatch, path))


def test_lost_steps_are_a_shaded_gap_and_no_idleness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    write_database(path, "cuda:0")
    with sqlite3.connect(path) as connection:
        ((begin_s,),) = connection.execute("SELECT min(started_s) FROM step").fetchall()
        lost = "started_s >= ? AND started_s < ?", (int(begin_s) + 2, int(begin_s) + 5)
        ((count, first),) = connection.execute(
            f"SELECT count(*), min(step) FROM step WHERE {lost[0]}", lost[1]
        ).fetchall()
        connection.execute(f"DELETE FROM step WHERE {lost[0]}", lost[1])
        connection.execute("INSERT INTO dropped VALUES (1, 'step', 'queue', ?, ?)", (begin_s + 5, count))
        ((before_s, after_s),) = connection.execute(
            "SELECT (SELECT started_s FROM step WHERE step = ?), (SELECT min(started_s) FROM step WHERE step > ?)",
            (first - 1, first),
        ).fetchall()
    app = show(monkeypatch, path)
    assert f"Shaded: {count:,} steps ran whose rows were lost" in texts(app)
    figure = spec(app, "speed")
    (band,) = figure["layout"]["shapes"]
    assert (band["x1"] - band["x0"]) / 1e3 == pytest.approx(after_s - before_s)
    answers = values_of(figure["data"][0]["y"])
    assert np.isnan(answers).sum() == 3, "no value where rows are missing, rather than 0"


def test_lost_steps_are_found_by_their_numbers(emulated: Path) -> None:
    db = queries.open_database(f"sqlite:///{emulated}")
    run = queries.runs(db)[0]
    assert queries.lost_steps(db, run, queries.window(run)) == []


def test_parts_have_distinct_hues() -> None:
    def channels(color: str) -> np.ndarray:
        return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)])

    colors = {name: palette.PART_COLORS[name] for name in (*STEP_PARTS, "rest", "other")}
    near = {
        (one, other): np.abs(channels(colors[one]) - channels(colors[other])).sum()
        for one, other in combinations(colors, 2)
    }
    assert min(near.values()) >= 48, min(near, key=near.__getitem__)
    seconds = {name: np.full(2, float(9 - at)) for at, name in enumerate(list(colors)[:7])}
    drawn = times.parts(np.arange(2.0), seconds, bucket_s=1).built().to_plotly_json()["data"]
    assert len({trace["fillcolor"] for trace in drawn}) == len(drawn) == 6
