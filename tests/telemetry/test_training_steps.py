"""Steps of fine-tuning in the database: written, replaced by an evaluation's, read by the queries, exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry import queries
from twofold.telemetry.exports import export_window, tables
from twofold.telemetry.sink import TeeSink, TelemetryLevel, TelemetrySink
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import LOAD, training_history, training_info
from tests.telemetry.records import scalar, url_of


def written(
    path: Path, *, steps: int = 30, level: TelemetryLevel = "expert"
) -> tuple[queries.Database, queries.Run]:
    sink = open_sink(url_of(path), level=level)
    training_history(TeeSink(TelemetrySink(), sink), steps=steps)
    sink.close()
    db = queries.open_database(url_of(path))
    return db, queries.runs(db)[0]


def test_a_step_is_a_row_that_its_evaluation_completes(tmp_path: Path) -> None:
    db, run = written(tmp_path / "t.db")
    assert (run.kind, run.model) == ("training", training_info().model)
    steps = queries.training_steps(db, run)
    assert steps.step.tolist() == list(range(1, 31))
    assert steps.loss[0] > steps.loss[-1]
    assert np.flatnonzero(~np.isnan(steps.eval_loss)).tolist() == [9, 19, 29]
    progress = queries.training_progress(db, run)
    assert progress is not None
    assert (progress.step, progress.num_steps, progress.remaining_s) == (30, 40, 20.0)
    (part,) = [each for each in tables.all_tables(db, export_window(db, run)) if each.name == "training_step"]
    assert [len(each["loss"]) for each in part.parts] == [30]
    assert "expert_load" not in part.columns


def test_many_steps_are_thinned_but_for_evaluations(tmp_path: Path) -> None:
    db, run = written(tmp_path / "t.db")
    steps = queries.training_steps(db, run, max_steps=8)
    assert steps.step.tolist() == [4, 8, 10, 12, 16, 20, 24, 28, 30]


def test_the_load_of_experts_is_summed_over_the_latest_steps(tmp_path: Path) -> None:
    db, run = written(tmp_path / "t.db")
    assert np.array_equal(queries.training_load(db, run), 30 * LOAD)
    assert np.array_equal(queries.training_load(db, run, max_steps=2), 2 * LOAD)


@pytest.mark.parametrize(("level", "bytes_"), [("step", False), ("layer", True)])
def test_the_load_is_recorded_from_the_level_of_layers_on(
    tmp_path: Path, level: TelemetryLevel, bytes_: bool
) -> None:
    db, run = written(tmp_path / "t.db", level=level)
    assert bool(scalar(tmp_path / "t.db", "SELECT length(expert_load) FROM training_step LIMIT 1")) == bytes_
    assert queries.training_load(db, run).any() == bytes_


def test_a_run_without_a_step_has_no_progress(tmp_path: Path) -> None:
    db, run = written(tmp_path / "t.db", steps=0)
    assert queries.training_progress(db, run) is None
    assert not len(queries.training_steps(db, run).step)
