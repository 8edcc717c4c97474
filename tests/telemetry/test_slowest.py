"""The slowest steps of a run and the figures of single steps, beside plain SQL."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from twofold.api.types import StepRecord
from twofold.telemetry import queries

from tests.dashboard.synthetic_run import run_info
from tests.telemetry.records import open_writer, step_record, url_of


def slowed(step: int) -> StepRecord:
    """Every tenth step takes longer; every seventh has prompt tokens."""
    record = step_record(step)
    wall_us = 5000.0 + step if step % 10 == 0 else 2000.0
    prefill = 7 if step % 7 == 0 else 0
    counted = 4 if step % 4 == 3 else None
    return record._replace(wall_us=wall_us, num_prefill_tokens=prefill, num_counted_steps=counted)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.db"
    sink = open_writer(path)
    sink.begin_run(run_info("none", num_slots=0))
    for step in range(200):
        sink.step(slowed(step))
    sink.close()
    return path


@pytest.mark.parametrize(("with_prompts", "where"), [(True, "1"), (False, "num_prefill_tokens = 0")])
def test_the_slowest_steps_are_those_of_the_whole_run(path: Path, *, with_prompts: bool, where: str) -> None:
    db = queries.open_database(url_of(path))
    (run,) = queries.runs(db)
    found = queries.SlowestSteps(db, run, with_prompts=with_prompts, limit=15)
    query = f"SELECT step FROM step WHERE {where} ORDER BY wall_us DESC, step DESC LIMIT 15"
    with sqlite3.connect(path) as connection:
        assert found.refresh() == [step for (step,) in connection.execute(query)]
        # Later looks read new steps alone.
        connection.execute("UPDATE step SET wall_us = 1e6 WHERE step = 3")
        connection.execute("UPDATE step SET step = 1000, wall_us = 8000 WHERE step = 2")
        connection.commit()
    assert found.refresh()[0] == 1000
    assert 3 not in found.refresh()


def test_a_slow_step_is_compared_with_the_steps_beside_it(path: Path) -> None:
    db = queries.open_database(url_of(path))
    (run,) = queries.runs(db)
    (step, first) = queries.slow_steps(db, run, (190, 0, 5000))
    assert (step.step, first.step) == (190, 0)
    assert step.started_s == step_record(190).started_s
    assert step.figures.times.wall_us == 5190
    assert step.usual.times.wall_us == 2000


def test_time_of_earlier_steps_in_a_count_is_known(path: Path) -> None:
    db = queries.open_database(url_of(path))
    (run,) = queries.runs(db)
    figures = queries.figures_of_steps(db, run, (11, 12, 13), 11)
    assert figures is not None
    step, usual = figures
    assert usual.times.wall_us == 2000
    assert step.counters.num_counted_steps == 4
    assert step.earlier_excess_us == 5010 - 2000, "step 10 is among the four"
    figures = queries.figures_of_steps(db, run, (15, 16, 17), 15)
    assert figures is not None
    assert figures[0].earlier_excess_us == 0


def test_the_parts_of_steps_sum_to_their_time(path: Path) -> None:
    db = queries.open_database(url_of(path))
    (run,) = queries.runs(db)
    steps = (3, 9, 10, 5000)
    parts = queries.parts_of_steps(db, run, steps)
    assert np.sum(list(parts.values()), axis=0)[:3].tolist() == [2000, 2000, 5010]
    assert all(np.isnan(values[3]) for values in parts.values()), "a lost row has no parts"
