"""The reader's sums: the same figures as asked of the tables, and no row read twice."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, SyntheticRun, hour_of_a_large_model, run_info
from tests.e2e.waiting import wait_until
from tests.telemetry import table_queries


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two runs; the second is 400 seconds long, with an idle stretch, and has several rows per second and layer."""
    url = f"sqlite:///{tmp_path_factory.mktemp('history') / 't.db'}"
    for stretches in ((4,), (100, 0, 250)):
        clock = ManualClock()
        sink = open_sink(url, max_queued_rows=1 << 22, now=clock)
        made = SyntheticRun(sink, clock, run_info(num_layers=3, num_experts=8, top_k=2, num_slots=9))
        for seconds in stretches:
            for second in range(seconds):
                if second % 5 == 0:
                    made.submit(prompt_tokens=4, answer_tokens=6)
                made.run_steps(2, 0.5)
            clock.now_s += 0 if seconds else 50
        sink.close()
    return url


@pytest.mark.parametrize("last_s", [60, 300, 350, None])
def test_sums_are_those_of_the_tables(recorded: str, last_s: int | None) -> None:
    db = queries.open_database(recorded)
    for run in queries.runs(db):
        history = queries.RunHistory(db, run)
        span = queries.window(run, last_s)
        grid, covered = history.placements(span)
        assert covered.begin_s <= span.begin_s
        assert covered.begin_s > span.begin_s - 60
        assert grid.total.sum() > 0
        np.testing.assert_array_equal(grid.uses, table_queries.placement_grid(db, run, covered).uses)
        kept, requested = (
            history.overview(span, max_buckets=70),
            table_queries.overview(db, run, span, max_buckets=70),
        )
        for name, value in requested.__dict__.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(getattr(kept, name), value, rtol=1e-12)
        assert kept.totals == requested.totals
        assert kept.steps.num_decode_tokens == requested.steps.num_decode_tokens


def test_each_look_reads_only_what_is_new(tmp_path: Path) -> None:
    """Counted in rows: however long the run was, a look costs what was recorded since the one before."""
    clock = ManualClock()
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}", now=clock)
    made = SyntheticRun(sink, clock, run_info(num_layers=3, num_experts=8, top_k=2, num_slots=9))

    def record(steps: int) -> None:
        made.submit(prompt_tokens=4, answer_tokens=steps)
        made.run_steps(steps, 1.0)

    record(60)
    db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
    wait_until(lambda: queries.runs(db))
    run = queries.runs(db)[0]
    history = queries.RunHistory(db, run)

    def hits() -> int:
        span = queries.Window(int(run.started_s), int(clock.now_s) + 1)
        return history.placements(span)[0].by_placement(queries.Placement.HIT)

    wait_until(lambda: hits() == made.num_hits)
    first = history.num_rows_read
    assert first >= 60 * 3
    assert hits() == made.num_hits
    assert history.num_rows_read == first
    record(2)
    wait_until(lambda: hits() == made.num_hits)
    assert 0 < history.num_rows_read - first <= 40
    sink.close()


def test_a_dropped_prefix_is_refused(recorded: str) -> None:
    db = queries.open_database(recorded)
    run = queries.runs(db)[0]
    history = queries.RunHistory(db, run)
    started_s = int(run.started_s)
    late = queries.Run(**{**run.__dict__, "started_s": started_s - 9000})
    with pytest.raises(ValueError, match="at most 3600"):
        queries.RunHistory(db, late).placements(queries.Window(started_s - 8000, started_s))
    assert history.placements(queries.Window(started_s, started_s + 1))[0].total.sum() > 0


def test_longer_windows_read_only_the_rows_before(recorded: str) -> None:
    """Looks at ever longer windows of one history: each has the tables' figures, and reads no row again."""
    db = queries.open_database(recorded)
    run = queries.runs(db)[0]
    history = queries.RunHistory(db, run)
    num_rows = []
    for last_s in (10, 60, 200, None):
        span = queries.window(run, last_s)
        kept, requested = history.overview(span), table_queries.overview(db, run, span)
        assert kept.totals == requested.totals
        np.testing.assert_allclose(kept.num_running, requested.num_running, rtol=1e-12)
        grid, covered = history.placements(span)
        np.testing.assert_array_equal(grid.uses, table_queries.placement_grid(db, run, covered).uses)
        num_rows.append(history.num_rows_read)
    assert num_rows == sorted(num_rows)
    assert num_rows[0] < num_rows[-1]
    whole = queries.RunHistory(db, run)
    whole.overview(queries.window(run))
    whole.placements(queries.window(run))
    assert whole.num_rows_read == num_rows[-1]


def test_hits_are_read_until_every_slot_is_explained(recorded: str) -> None:
    db = queries.open_database(recorded)
    run = queries.runs(db)[0]
    history = queries.RunHistory(db, run)
    whole = table_queries.placement_grid(db, run, queries.window(run)).uses[:, :, queries.Placement.HIT]
    wanted = int((whole > 0).sum())
    wait_until(lambda: int((history.hits(wanted) > 0).sum()) == wanted)
    assert (history.hits(wanted + 1) <= whole).all()


@pytest.mark.slow
def test_an_hour_of_a_large_model_is_drawn_from_sums(tmp_path: Path) -> None:
    clock = ManualClock()
    url = f"sqlite:///{tmp_path / 't.db'}"
    sink = open_sink(url, max_queued_rows=1 << 23, now=clock)
    hour_of_a_large_model(sink, clock)
    sink.close()
    db = queries.open_database(url)
    run = queries.runs(db)[0]
    span = queries.window(run)
    history = queries.RunHistory(db, run)
    took = {}
    for name, look in {
        "grid from the tables": lambda: table_queries.placement_grid(db, run, span),
        "grid, first look": lambda: history.placements(span),
        "grid, next look": lambda: history.placements(span),
        "overview from the tables": lambda: table_queries.overview(db, run, span),
        "overview, first look": lambda: history.overview(span),
        "overview, next look": lambda: history.overview(span),
    }.items():
        begun_s = time.perf_counter()
        look()
        took[name] = time.perf_counter() - begun_s
        print(f"\n{name}: {took[name] * 1e3:.1f} ms", end="")
    assert took["grid, next look"] < took["grid from the tables"] / 10
    assert took["overview, next look"] < took["overview from the tables"] / 3
