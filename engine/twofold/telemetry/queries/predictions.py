"""Error of the cost model's predicted layer times. Meaningful only in real time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from sqlalchemy import ColumnElement, Integer, func, literal_column, select, text

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run

MAX_ROWS: Final = 100_000
"""Latest rows of token_layer that are read: all rows of a long run would take seconds."""

_ROWID: Final[ColumnElement[int]] = literal_column("token_layer.rowid", Integer)


@dataclass(frozen=True)
class PredictionError:
    """|predicted / measured - 1| over layers of steps, each counted once whatever its number of tokens."""

    num_layers: int
    median: float
    p90: float


def prediction_error(db: Database, run: Run) -> PredictionError | None:
    """Prediction error of the layers in the run's latest MAX_ROWS rows. None where time is virtual (equal by
    construction) or nothing was predicted (`twofold calibrate` never ran here)."""
    if run.emulated:
        return None
    # One at a time: for both at once, SQLite reads the whole table.
    lowest, highest = (
        db.rows(select(bound(_ROWID)).select_from(schema.token_layer))[0][0] or 0
        for bound in (func.min, func.max)
    )
    last = _last_row(db, run, lowest, highest)
    row = schema.token_layer.c
    query = (
        select(func.max(row.layer_us), func.max(row.predicted_us))
        .where(last - MAX_ROWS < _ROWID, last >= _ROWID)
        # "+": by row number instead of the index by request.
        .where(text("+token_layer.run_id = :run_id").bindparams(run_id=run.run_id))
        .where(row.predicted_us > 0, row.layer_us > 0)
        .group_by(row.step, row.layer)
    )
    times = np.array([tuple(r) for r in db.rows(query)], np.float64).reshape(-1, 2)
    if not len(times):
        return None
    errors = np.abs(times[:, 1] / times[:, 0] - 1)
    return PredictionError(len(errors), float(np.median(errors)), float(np.percentile(errors, 90)))


def _last_row(db: Database, run: Run, lowest: int, highest: int) -> int:
    """Number of the run's last row in token_layer, or one below: rows of a run are contiguous, runs in order."""
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        query = select(schema.token_layer.c.run_id).where(middle <= _ROWID).order_by(_ROWID).limit(1)
        (found,) = db.rows(query)
        if found.run_id <= run.run_id:
            lowest = middle
        else:
            highest = middle - 1
    return lowest
