"""Time of one step by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
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


@dataclass(frozen=True)
class StepFigures:
    """What a step took and did. `usual_step` has the medians of several."""

    times: StepTimes
    counters: StepCounters
    num_prefill_tokens: float


def figures_of_steps(
    db: Database, run: Run, steps: tuple[int, ...], chosen: int
) -> tuple[StepFigures, StepFigures] | None:
    """(step `chosen`, medians of `steps`); None if the row of `chosen` was lost or removed by retention.

    steps: ascending, those that the chosen one is compared with.
    """
    columns = schema.step.c
    query = select(schema.step).where(
        columns.run_id == run.run_id, columns.step >= steps[0], columns.step <= steps[-1]
    )
    wanted = set(steps)
    rows = [row for row in (each._mapping for each in db.rows(query)) if row["step"] in wanted]
    table = {
        name: np.array([np.nan if row[name] is None else row[name] for row in rows], np.float64)
        for name in _FIGURES
    }
    if chosen not in (found := [row["step"] for row in rows]):
        return None
    at = found.index(chosen)
    return _figures({name: float(values[at]) for name, values in table.items()}), _figures(
        {name: _median(values) for name, values in table.items()}
    )


_FIGURES: Final = (
    "wall_us",
    "step_us",
    "num_prefill_tokens",
    "involuntary_switches",
    "major_faults",
    "cpu_us",
    *StepParts._fields,
    *(f"emulated_{name}" for name in EmulatedParts._fields),
)


def _median(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _figures(row: Mapping[str, float]) -> StepFigures:
    def known(name: str) -> float | None:
        return None if np.isnan(row[name]) else row[name]

    def count(name: str) -> int | None:
        return None if np.isnan(row[name]) else round(row[name])

    parts = {name: row[f"{name}_us"] for name in STEP_PARTS}
    parts["rest"] = max(row["wall_us"] - sum(parts.values()), 0.0)
    emulated = {name: row[f"emulated_{name}_us"] for name in EMULATED_PARTS}
    if any(np.isnan(us) for us in emulated.values()):
        emulated = {}
    times = StepTimes(row["wall_us"], parts, row["step_us"] if emulated else 0.0, emulated)
    counters = StepCounters(count("involuntary_switches"), count("major_faults"), known("cpu_us"))
    return StepFigures(times, counters, row["num_prefill_tokens"])


def speculation(db: Database, run: Run) -> tuple[int, int]:
    """Draft tokens of the run, and those accepted; 0 where speculation was off."""
    table = schema.step.c
    query = select(func.sum(table.num_drafted_tokens), func.sum(table.num_accepted_tokens)).where(
        table.run_id == run.run_id
    )
    ((drafted, accepted),) = db.rows(query)
    return int(drafted or 0), int(accepted or 0)
