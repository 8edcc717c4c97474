"""Drafted tokens of a run: acceptance by position, depths, and how well the price predicted their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run, Window

F64 = npt.NDArray[np.float64]
MAX_DRAFT_STEPS: Final = 20_000
"""Most steps that `draft_steps` reads, the newest."""


def draft_acceptance(db: Database, run: Run) -> list[tuple[int, int]]:
    """(accepted, tried) by position in a draft; empty without drafts.

    A position counts as tried where all before it were accepted. Only steps of a single sequence are read, because a
    step's counts do not say which of several drafts was rejected.
    """
    table = schema.step.c
    query = (
        select(table.num_drafted_tokens, table.num_accepted_tokens, func.count())
        .where(
            table.run_id == run.run_id,
            table.num_drafted_tokens > 0,
            table.num_prefill_tokens == 0,
            table.num_decode_tokens == table.num_drafted_tokens + 1,
        )
        .group_by(table.num_drafted_tokens, table.num_accepted_tokens)
    )
    rows = [tuple(map(int, row)) for row in db.rows(query)]
    deepest = max((drafted for drafted, _, _ in rows), default=0)
    return [
        (
            sum(count for _, accepted, count in rows if accepted > position),
            sum(count for drafted, accepted, count in rows if drafted > position <= accepted),
        )
        for position in range(deepest)
    ]


@dataclass(frozen=True)
class DraftSteps:
    """Decode steps of a window, without prompts, in order; arrays of one entry per step."""

    started_s: F64
    depth: F64
    """Drafted tokens per sequence."""
    yielded: F64
    """Tokens per sequence: the step's own and its accepted drafts."""
    predicted_us: F64
    """0: no drafts, or no price."""
    step_us: F64

    def __len__(self) -> int:
        return len(self.started_s)


def draft_steps(db: Database, run: Run, span: Window) -> DraftSteps:
    """The newest decode steps of the window, at most MAX_DRAFT_STEPS."""
    table = schema.step.c
    query = (
        select(
            table.started_s,
            table.num_decode_tokens,
            table.num_drafted_tokens,
            table.num_accepted_tokens,
            table.predicted_us,
            table.step_us,
        )
        .where(
            table.run_id == run.run_id,
            table.num_prefill_tokens == 0,
            table.num_decode_tokens > table.num_drafted_tokens,
            table.started_s >= span.begin_s,
            table.started_s < span.end_s,
        )
        .order_by(table.step.desc())
        .limit(MAX_DRAFT_STEPS)
    )
    found = np.array([tuple(row) for row in db.rows(query)], np.float64).reshape(-1, 6)[::-1].T
    started_s, decoded, drafted, accepted, predicted_us, step_us = found
    sequences = decoded - drafted
    return DraftSteps(started_s, drafted / sequences, 1 + accepted / sequences, predicted_us, step_us)
