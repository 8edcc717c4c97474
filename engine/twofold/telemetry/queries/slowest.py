"""The slowest steps of a run, kept by the reader: each refresh reads only new rows."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
from sqlalchemy import ColumnElement, select

from twofold.telemetry import schema
from twofold.telemetry.queries.native_events import events
from twofold.telemetry.queries.overview import newest_step
from twofold.telemetry.queries.runs import Database, Run
from twofold.telemetry.queries.step_times import StepFigures, figures_at, step_table, usual_figures

_BESIDE: Final = 64
"""Steps before and after a step with which it is compared."""


class SlowestSteps:
    """The steps that took longest by the wall clock, for any number of viewers and threads.

    The first look reads the time of every step, 0.9 s for a million; later ones read those of new steps.
    """

    def __init__(self, db: Database, run: Run, *, with_prompts: bool, limit: int = 20) -> None:
        """with_prompts: also steps that computed prompt tokens."""
        self._db, self._run, self._limit = db, run, limit
        self._with_prompts = with_prompts
        self._mutex = threading.Lock()
        self._last = -1
        self._found: list[tuple[float, int]] = []

    def refresh(self) -> list[int]:
        """Numbers of the steps, the slowest one first."""
        with self._mutex:
            until = newest_step(self._db, self._run)
            if until is not None and until > self._last:
                columns = schema.step.c
                conditions: list[ColumnElement[bool]] = [
                    columns.run_id == self._run.run_id,
                    columns.step > self._last,
                    columns.step <= until,
                ]
                if not self._with_prompts:
                    conditions.append(columns.num_prefill_tokens == 0)
                query = select(columns.wall_us, columns.step).where(*conditions)
                rows = self._db.rows(query.order_by(columns.wall_us.desc()).limit(self._limit))
                found = [*self._found, *((float(wall_us), int(step)) for wall_us, step in rows)]
                self._found = sorted(found, reverse=True)[: self._limit]
                self._last = until
            return [step for _, step in self._found]


@dataclass(frozen=True)
class SlowStep:
    """A step beside the usual one: the medians of the steps before and after it."""

    step: int
    started_s: float
    """Unix time."""
    figures: StepFigures
    usual: StepFigures


def slow_steps(db: Database, run: Run, steps: tuple[int, ...]) -> list[SlowStep]:
    """Figures of these steps, a few dozen, in the same order; those that retention removed are missing."""
    columns = schema.step.c
    query = select(columns.step, columns.started_s).where(
        columns.run_id == run.run_id, columns.step.in_(steps)
    )
    started_s = {int(step): float(at_s) for step, at_s in db.rows(query)}
    found = []
    for step in steps:
        if step not in started_s:
            continue
        numbers, table = step_table(db, run, max(0, step - _BESIDE), step + _BESIDE)
        at = int(np.flatnonzero(numbers == step)[0])
        usual = usual_figures({name: np.delete(values, at) for name, values in table.items()})
        if len(numbers) > 1:
            found.append(SlowStep(step, started_s[step], figures_at(table, at, usual), usual))
    return found


def tokens_of_step(db: Database, run: Run, step: int) -> list[tuple[int, int]]:
    """(request, position) of the step's tokens, the last one of each request; empty below level "expert"."""
    rows = events(db, run, "token_layer", first_step=step, last_step=step)
    last: dict[int, int] = {}
    for request, position in zip(rows["request"].tolist(), rows["position"].tolist(), strict=True):
        last[request] = max(position, last.get(request, -1))
    return sorted(last.items())
