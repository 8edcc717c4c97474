"""The exported part of a run: a time range, and the steps that ran in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, or_, select

from twofold.api.errors import ConfigError
from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run

STEPS_AT_A_TIME = 256
"""Steps whose events are read and written together; bounds the memory of an export."""


@dataclass(frozen=True)
class ExportWindow:
    """A time range of a run in Unix seconds, end excluded, and its steps: first and last number, both included.

    A step that was running when the range begins belongs to it as a whole: `begin_s` is then that step's begin.
    """

    run: Run
    begin_s: float
    end_s: float
    first_step: int
    last_step: int
    """Below first_step if no step began in the range."""
    is_whole: bool = False
    """Whether the whole run was asked for."""

    @property
    def num_steps(self) -> int:
        return max(0, self.last_step - self.first_step + 1)

    def step_ranges(self) -> Iterator[tuple[int, int]]:
        """First and last step of each part, in order."""
        for first in range(self.first_step, self.last_step + 1, STEPS_AT_A_TIME):
            yield first, min(first + STEPS_AT_A_TIME - 1, self.last_step)


def export_window(
    db: Database, run: Run, *, begin: str | None = None, end: str | None = None, last_s: float | None = None
) -> ExportWindow:
    """The steps of `run` from `begin` to `end`, or those of its last `last_s` seconds; the whole run by default.

    A moment is seconds since the run's start ("12.5") or an ISO 8601 time ("2026-01-31T12:00:00Z"). ConfigError for
    any other text, for a range that ends before it begins or holds nothing, and for `last_s` beside a range.
    """
    if last_s is not None and (begin is not None or end is not None):
        raise ConfigError("--window was given together with --from or --to; give the range or its length")
    if last_s is not None and not 0 < last_s < math.inf:
        raise ConfigError(f"--window is {last_s}; expected a number of seconds above 0")
    begin_s = run.started_s if begin is None else _moment(begin, run, "--from")
    end_s = math.inf if end is None else _moment(end, run, "--to")
    if end_s <= begin_s:
        raise ConfigError(f"--to {end} is not after the begin of the range, --from {begin or 0}")
    column = schema.step.c
    of_run = column.run_id == run.run_id
    ends_s = db.rows(select(func.max(column.started_s)).where(of_run, column.started_s < end_s))[0][0]
    if last_s is not None and ends_s is not None:
        begin_s = max(begin_s, ends_s - last_s)
    is_whole = begin is None and end is None and last_s is None
    begin_s, from_s = (begin_s, begin_s) if is_whole else _step_begin(db, run, begin_s)
    first, last, ended_s = db.rows(
        select(
            func.min(column.step), func.max(column.step), func.max(column.started_s + column.wall_us * 1e-6)
        ).where(of_run, column.started_s >= from_s, column.started_s < end_s)
    )[0]
    if end is None:
        # A load sample may arrive after the last step.
        end_s = max(run.finished_s or run.last_seen_s, ended_s or begin_s) + 1.0
    steps = (0, -1) if first is None else (int(first), int(last))
    window = ExportWindow(run, begin_s, end_s, *steps, is_whole=is_whole)
    if not is_whole and first is None:
        _need_rows(db, window)
    return window


def _step_begin(db: Database, run: Run, moment_s: float) -> tuple[float, float]:
    """Begin of the step that runs at the moment, and its `started_s`; the moment itself between steps.

    A step begins with its scheduling, before `started_s`.
    """
    column = schema.step.c
    query = select(column.started_s, column.schedule_us, column.wall_us, column.telemetry_us).where(
        column.run_id == run.run_id
    )
    before = query.where(column.started_s < moment_s).order_by(column.started_s.desc()).limit(1)
    after = query.where(column.started_s >= moment_s).order_by(column.started_s).limit(1)
    for step in (*db.rows(before), *db.rows(after)):
        begin_s = step.started_s - step.schedule_us * 1e-6
        if begin_s < moment_s < begin_s + (step.wall_us - step.telemetry_us) * 1e-6:
            return begin_s, step.started_s
    return moment_s, moment_s


def _need_rows(db: Database, window: ExportWindow) -> None:
    """ConfigError if nothing of the run falls into a window without steps."""
    run, request, training = window.run, schema.request.c, schema.training_step.c
    found = [
        select(request.number).where(
            request.run_id == run.run_id,
            request.submitted_s < window.end_s,
            or_(request.finished_s.is_(None), request.finished_s >= window.begin_s),
        ),
        select(training.step).where(
            training.run_id == run.run_id, training.at_s >= window.begin_s, training.at_s < window.end_s
        ),
    ]
    if any(db.rows(query.limit(1)) for query in found):
        return
    lasted_s = (run.finished_s or run.last_seen_s) - run.started_s
    raise ConfigError(
        f"run {run.run_id} has no step and no request between {window.begin_s - run.started_s:.1f} and "
        f"{window.end_s - run.started_s:.1f} s after its start; it lasted {lasted_s:.1f} s: choose another range"
    )


def _moment(text: str, run: Run, flag: str) -> float:
    """Unix time of a moment."""
    try:
        since_start_s = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(
                f"{flag} is {text!r}; expected seconds since the run's start (12.5) or an ISO 8601 time "
                "(2026-01-31T12:00:00Z)"
            ) from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= since_start_s < math.inf:
        raise ConfigError(f"{flag} is {text!r}; expected 0 or more seconds since the run's start")
    return run.started_s + since_start_s
