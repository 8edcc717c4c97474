"""Error of the cost model's predicted layer times. Meaningful only in real time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from sqlalchemy import select

from twofold.telemetry import schema
from twofold.telemetry.queries.native_events import events
from twofold.telemetry.queries.runs import Database, Run

MAX_ROWS: Final = 100_000
"""Latest token_layer events that are read: all those of a long run would take seconds."""

_MOST_BLOCKS: Final = 20_000


@dataclass(frozen=True)
class EstimateError:
    """|predicted / measured - 1| over layers of steps, each counted once whatever its number of tokens."""

    num_layers: int
    median: float
    p90: float


def estimate_error(db: Database, run: Run) -> EstimateError | None:
    """Prediction error of the layers in the run's latest MAX_ROWS rows. None where time is virtual (equal by
    construction) or nothing was predicted (`twofold calibrate` never ran here)."""
    if run.emulated:
        return None
    table = schema.BLOCKS["token_layer"].c
    newest = select(table.first_step, table.num_events).where(table.run_id == run.run_id)
    blocks = db.rows(newest.order_by(table.last_step.desc()).limit(_MOST_BLOCKS))
    enough = int(np.searchsorted(np.cumsum([block.num_events for block in blocks]), MAX_ROWS))
    # A long request's block can begin before blocks that end earlier.
    first_step = min((block.first_step for block in blocks[: enough + 1]), default=0)
    rows = events(db, run, "token_layer", first_step=first_step)
    rows = rows[(rows["predicted_us"] > 0) & (rows["layer_us"] > 0)]
    if not len(rows):
        return None
    _, index = np.unique(rows["step"] * (1 + int(rows["layer"].max())) + rows["layer"], return_index=True)
    errors = np.abs(rows["predicted_us"][index].astype(float) / rows["layer_us"][index] - 1)
    return EstimateError(len(errors), float(np.median(errors)), float(np.percentile(errors, 90)))
