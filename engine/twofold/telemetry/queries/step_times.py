"""Time of one step by part."""

from __future__ import annotations

import dataclasses
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
    """The kernel's and the interpreter's counters of one step; None where the run did not record them.

    Those without "in this step" cover `num_counted_steps`, this one last; medians are per step.
    """

    involuntary_switches: float | None = None
    """Times that the kernel took a core from the process for another one."""
    major_faults: float | None = None
    """Pages read from disk."""
    cpu_us: float | None = None
    """CPU time of all threads."""
    engine_cpu_us: float | None = None
    """CPU time of the engine's thread, in this step."""
    collection_us: float | None = None
    """Garbage collections, in this step."""
    num_full_collections: float | None = None
    """Garbage collections of the oldest generation, in this step."""
    num_counted_steps: float | None = None
    minor_faults: float | None = None
    """Pages mapped without reading."""
    core_wait_us: float | None = None
    """Time that the engine's thread was ready and had no core."""
    others_core_wait_us: float | None = None
    """The same of the other thread of the process that waited longest."""
    others_cpu_us: float | None = None
    """CPU time of Python's other threads."""
    num_pinned_threads: float | None = None
    """Computing threads with fewer cores than at the engine's start."""


_COUNTERS: Final = tuple(StepCounters.__dataclass_fields__)
_OF_SEVERAL_STEPS: Final = (
    "involuntary_switches",
    "major_faults",
    "cpu_us",
    "minor_faults",
    "core_wait_us",
    "others_core_wait_us",
    "others_cpu_us",
)
_LONGER: Final = 1.15


def step_counters(db: Database, run: Run, steps: tuple[int, ...]) -> dict[int, StepCounters]:
    """Counters of these steps, at most a few hundred; a lost step is missing."""
    table = schema.step.c
    query = select(table.step, *(table[name] for name in _COUNTERS)).where(
        table.run_id == run.run_id, table.step.in_(steps)
    )
    return {row[0]: StepCounters(*row[1:]) for row in db.rows(query)}


@dataclass(frozen=True)
class StepFigures:
    """What a step took and did. The usual step has the medians of several."""

    times: StepTimes
    counters: StepCounters
    num_prefill_tokens: float
    num_decode_tokens: float = 1.0
    num_misses: float | None = None
    """Routed experts that were not resident; None without slots."""
    num_fetched: float | None = None
    upload_bytes: float | None = None
    earlier_excess_us: float = 0.0
    """Time above the usual of the earlier steps that the counters cover too."""


def figures_of_steps(
    db: Database, run: Run, steps: tuple[int, ...], chosen: int
) -> tuple[StepFigures, StepFigures] | None:
    """(step `chosen`, medians of the other `steps`); None if the row of `chosen` was lost or removed by retention.

    steps: ascending, those that the chosen one is compared with.
    """
    found, table = step_table(db, run, max(0, steps[0] - _MOST_COUNTED), steps[-1])
    if chosen not in found:
        return None
    is_compared = np.isin(found, steps)
    if is_compared.sum() > 1:  # it may have the only reading of the counters
        is_compared &= found != chosen
    compared = {name: values[is_compared] for name, values in table.items()}
    usual = usual_figures(compared)
    return figures_at(table, int(np.flatnonzero(found == chosen)[0]), usual), usual


_MOST_COUNTED: Final = 256
"""Most steps that one reading of the counters covers: 32, or as many as it takes to save the time of a reading."""


Table = Mapping[str, npt.NDArray[np.float64]]
"""Columns of table `step`; NULL is NaN."""


def step_table(
    db: Database, run: Run, first: int, last: int
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.float64]]]:
    """Steps `first` to `last`: their numbers, ascending, and their figures by column."""
    columns = schema.step.c
    query = select(columns.step, *(columns[name] for name in _FIGURES))
    query = query.where(columns.run_id == run.run_id, columns.step >= first, columns.step <= last)
    rows = np.array([tuple(row) for row in db.rows(query.order_by(columns.step))], np.float64)
    rows = rows.reshape(-1, 1 + len(_FIGURES))
    return rows[:, 0].astype(np.int64), dict(zip(_FIGURES, rows[:, 1:].T, strict=True))


def parts_of_steps(
    db: Database, run: Run, steps: tuple[int, ...], *, emulated: bool = False
) -> dict[str, npt.NDArray[np.float64]]:
    """Microseconds of `steps` (ascending) by part, [steps], those with most time first; NaN where a row was lost.

    Names as in `StepTimes`. emulated: on the virtual clock.
    """
    numbers, table = step_table(db, run, steps[0], steps[-1])
    at = np.searchsorted(numbers, steps).clip(max=max(len(numbers) - 1, 0))
    is_found = numbers[at] == steps if len(numbers) else np.zeros(len(steps), bool)
    prefix, names = ("emulated_", EMULATED_PARTS) if emulated else ("", STEP_PARTS)
    found = {
        name: np.where(is_found, table[f"{prefix}{name}_us"][at], np.nan)
        if len(numbers)
        else np.full(len(steps), np.nan)
        for name in names
    }
    if not emulated and len(numbers):
        rest = table["wall_us"][at] - np.sum(list(found.values()), axis=0)
        found["rest"] = np.where(is_found, np.maximum(rest, 0.0), np.nan)
    return {name: found[name] for name in sorted(found, key=lambda name: -np.nansum(found[name]))}


_WORK: Final = ("num_prefill_tokens", "num_decode_tokens", "num_misses", "num_fetched", "upload_bytes")
_FIGURES: Final = (
    "wall_us",
    "step_us",
    *_WORK,
    *_COUNTERS,
    *StepParts._fields,
    *(f"emulated_{name}" for name in EmulatedParts._fields),
)


def usual_figures(table: Table) -> StepFigures:
    """Medians of steps. Counters that cover several steps count per step, and only where the time was usual: they are
    read more often after long steps."""
    wall_us = table["wall_us"]
    is_usual = wall_us <= _LONGER * _median(wall_us)
    usual = {name: _median(values) for name, values in table.items()}
    for name in _OF_SEVERAL_STEPS:
        per_step = table[name] / table["num_counted_steps"]
        found = _median(per_step[is_usual])
        usual[name] = found if not np.isnan(found) else _median(per_step)
    return _figures(usual)


def figures_at(table: Table, at: int, usual: StepFigures) -> StepFigures:
    """Figures of the step in row `at`; the rows before it are the steps before it."""
    step = _figures({name: float(values[at]) for name, values in table.items()})
    earlier_us = table["wall_us"][max(0, at + 1 - round(step.counters.num_counted_steps or 1)) : at]
    excess_us = float(np.maximum(earlier_us - usual.times.wall_us, 0.0).sum())
    return dataclasses.replace(step, earlier_excess_us=excess_us)


def _median(values: npt.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _figures(row: Mapping[str, float]) -> StepFigures:
    def known(name: str) -> float | None:
        return None if np.isnan(row[name]) else row[name]

    parts = {name: row[f"{name}_us"] for name in STEP_PARTS}
    parts["rest"] = max(row["wall_us"] - sum(parts.values()), 0.0)
    emulated = {name: row[f"emulated_{name}_us"] for name in EMULATED_PARTS}
    if any(np.isnan(us) for us in emulated.values()):
        emulated = {}
    times = StepTimes(row["wall_us"], parts, row["step_us"] if emulated else 0.0, emulated)
    prefill, decode, *experts = (known(name) for name in _WORK)
    counters = StepCounters(*(known(name) for name in _COUNTERS))
    misses, fetched, uploaded = experts
    return StepFigures(times, counters, prefill or 0.0, decode or 0.0, misses, fetched, uploaded)


def speculation(db: Database, run: Run) -> tuple[int, int]:
    """Draft tokens of the run, and those accepted; 0 where speculation was off."""
    table = schema.step.c
    query = select(func.sum(table.num_drafted_tokens), func.sum(table.num_accepted_tokens)).where(
        table.run_id == run.run_id
    )
    ((drafted, accepted),) = db.rows(query)
    return int(drafted or 0), int(accepted or 0)
