"""How well the cost model told the layers' times before they ran. Only real time can contradict it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sqlalchemy import func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run

MOST_LAYERS = 200_000


@dataclass(frozen=True)
class PredictionError:
    """|predicted / measured - 1| over layers of steps, each counted once however many tokens it had."""

    num_layers: int
    median: float
    p90: float


def prediction_error(db: Database, run: Run) -> PredictionError | None:
    """Of the latest MOST_LAYERS predicted layers. None where time is virtual (equal by construction) or nothing was
    predicted (`twofold calibrate` never ran here)."""
    if run.emulated:
        return None
    row = schema.token_layer.c
    query = (
        select(func.max(row.layer_us), func.max(row.predicted_us))
        .where(row.run_id == run.run_id, row.predicted_us > 0, row.layer_us > 0)
        .group_by(row.step, row.layer)
        .order_by(row.step.desc())
        .limit(MOST_LAYERS)
    )
    times = np.array([tuple(r) for r in db.rows(query)], np.float64).reshape(-1, 2)
    if not len(times):
        return None
    errors = np.abs(times[:, 1] / times[:, 0] - 1)
    return PredictionError(len(errors), float(np.median(errors)), float(np.percentile(errors, 90)))
