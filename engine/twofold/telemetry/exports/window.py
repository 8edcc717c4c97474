"""The exported part of a run: a time range, and the steps that began in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import func, select

from twofold.api.errors import ConfigError
from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run

STEPS_AT_A_TIME = 256
"""Steps whose events are read and written together; bounds the memory of an export."""


@dataclass(frozen=True)
class ExportWindow:
    """A time range of a run in Unix seconds, end excluded, and its steps: first and last number, both included."""

    run: Run
    begin_s: float
    end_s: float
    first_step: int
    last_step: int
    """Below first_step if no step began in the range."""

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
    any other text, for a range that ends before it begins, and for `last_s` beside a range.
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
    ends_s = db.rows(
        select(func.max(column.started_s)).where(column.run_id == run.run_id, column.started_s < end_s)
    )[0][0]
    if last_s is not None and ends_s is not None:
        begin_s = max(begin_s, ends_s - last_s)
    first, last, ended_s = db.rows(
        select(
            func.min(column.step), func.max(column.step), func.max(column.started_s + column.wall_us * 1e-6)
        ).where(column.run_id == run.run_id, column.started_s >= begin_s, column.started_s < end_s)
    )[0]
    if end is None:
        # A load sample may arrive after the last step.
        end_s = max(run.finished_s or run.last_seen_s, ended_s or begin_s) + 1.0
    return ExportWindow(run, begin_s, end_s, *((0, -1) if first is None else (first, last)))


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
