"""Records for tests of the database, and the database read back."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
from twofold.api.types import StepRecord
from twofold.telemetry import queries
from twofold.telemetry.sink import TOKEN_LAYER_DTYPE
from twofold.telemetry.writer import DatabaseSink, open_sink


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def open_writer(path: Path, **options: object) -> DatabaseSink:
    sink = open_sink(url_of(path), **options)  # type: ignore[arg-type]
    assert isinstance(sink, DatabaseSink)
    return sink


def token_layers(count: int, *, step: int = 0) -> np.ndarray:
    rows = np.zeros(count, TOKEN_LAYER_DTYPE)
    rows["step"], rows["num_routed"], rows["num_hits"] = step, 4, 4
    rows["layer"] = np.arange(count) % 6
    rows["experts"] = np.arange(16)
    return rows


def times_of_step(db: queries.Database, run: queries.Run, step: int) -> queries.StepTimes | None:
    """Times of one step; None if its row was lost."""
    found = queries.figures_of_steps(db, run, (step,), step)
    return None if found is None else found[0].times


def step_record(step: int) -> StepRecord:
    return StepRecord(step, 1_700_000_000.0 + step, 0, 1, 1, 0, 1000.0, 2000.0)


def scalar(path: Path, sql: str) -> object:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchone()[0]
    finally:
        connection.close()
