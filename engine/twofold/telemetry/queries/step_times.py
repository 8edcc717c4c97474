"""Time of one step by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from twofold.api.types import EmulatedParts, StepParts
from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run

STEP_PARTS: Final = tuple(part.removesuffix("_us") for part in StepParts._fields)
EMULATED_PARTS: Final = tuple(part.removesuffix("_us") for part in EmulatedParts._fields)


@dataclass(frozen=True)
class StepTimes:
    """One step by part, in microseconds. Keys are those of STEP_PARTS and "rest", and of EMULATED_PARTS."""

    wall_us: float
    parts_us: Mapping[str, float]
    """Sum to wall_us."""
    emulated_us: float
    """On the virtual clock; 0 in real time."""
    emulated_parts_us: Mapping[str, float]
    """Sum to emulated_us; empty in real time."""


def step_times(db: Database, run: Run, step: int) -> StepTimes | None:
    """Times of one step; None if its row was lost or removed by retention."""
    table = schema.step
    rows = db.rows(select(table).where(table.c.run_id == run.run_id, table.c.step == step))
    if not rows:
        return None
    row = rows[0]._mapping
    parts = {name: float(row[f"{name}_us"]) for name in STEP_PARTS}
    # A device's own clock may count slightly more than the wall clock.
    parts["rest"] = max(row["wall_us"] - sum(parts.values()), 0.0)
    emulated: dict[str, float] = {}
    if row["emulated_dense_us"] is not None:
        emulated = {name: float(row[f"emulated_{name}_us"]) for name in EMULATED_PARTS}
    return StepTimes(float(row["wall_us"]), parts, float(row["step_us"]) if emulated else 0.0, emulated)
