"""Gaps between the tokens of answers (ITL), from the ends of consecutive steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run, Window

F64 = npt.NDArray[np.float64]

MAX_STEPS: Final = 20_000
"""Steps of a window that are read, of a longer window every second, third, … one: 50 ms of CPU for five minutes of 100
steps a second, 160 ms for 35 minutes, whose rows are all looked at (AVX2, quiet)."""


@dataclass(frozen=True)
class TokenGaps:
    """Gaps between tokens: a step's end minus the end of the step before, once for each answer that got a token."""

    at_s: F64
    """[gaps] Unix time at which the step began."""
    gap_s: F64
    """[gaps] wall clock."""
    every: int
    """1: all steps of the window; n: every n-th."""


def token_gaps(db: Database, run: Run, span: Window) -> TokenGaps:
    """Gaps of the answers that a window's steps went on with. First tokens have none; nor has the first token after a
    preemption, or after a step whose row was lost."""
    table = schema.step
    step, before = table.c, table.alias("before").c
    within = (step.run_id == run.run_id, step.started_s >= span.begin_s, step.started_s < span.end_s)
    ((num_steps,),) = db.rows(select(func.count()).select_from(table).where(*within))
    every = max(1, -(-int(num_steps) // MAX_STEPS))
    num_answers = step.num_decode_tokens - step.num_drafted_tokens
    gap_s = step.started_s - before.started_s + (step.wall_us - before.wall_us) / 1e6
    query = (
        select(step.started_s, gap_s, num_answers)
        .where(*within, step.step % every == 0, num_answers > 0)
        .where(before.run_id == step.run_id, before.step == step.step - 1)
    )
    # By column: to make a tuple of each row took as long as the query.
    at, gaps, answers = list(zip(*db.rows(query), strict=True)) or [()] * 3
    counts = np.array(answers, np.int64)
    return TokenGaps(
        np.repeat(np.array(at, np.float64), counts), np.repeat(np.array(gaps, np.float64), counts), every
    )
