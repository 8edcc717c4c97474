"""Time of one step by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select

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


@dataclass(frozen=True)
class StepCounters:
    """The kernel's counters of one step; None where the run did not record them."""

    involuntary_switches: int | None
    """Times that the kernel took a core from the process for another one."""
    major_faults: int | None
    """Pages read from disk."""
    cpu_us: float | None
    """CPU time of all threads."""


def step_counters(db: Database, run: Run, steps: tuple[int, ...]) -> dict[int, StepCounters]:
    """Counters of these steps, at most a few hundred; a lost step is missing."""
    table = schema.step.c
    query = select(table.step, table.involuntary_switches, table.major_faults, table.cpu_us).where(
        table.run_id == run.run_id, table.step.in_(steps)
    )
    return {row[0]: StepCounters(*row[1:]) for row in db.rows(query)}


def speculation(db: Database, run: Run) -> tuple[int, int]:
    """Draft tokens of the run, and those accepted; 0 where speculation was off."""
    table = schema.step.c
    query = select(func.sum(table.num_drafted_tokens), func.sum(table.num_accepted_tokens)).where(
        table.run_id == run.run_id
    )
    ((drafted, accepted),) = db.rows(query)
    return int(drafted or 0), int(accepted or 0)
