"""Replicas of a fleet: runs, routing decisions, prefix-cache hits, requests by trace id, measured steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sqlalchemy import case, func, select

from twofold.api.request_origin import RoutedBy
from twofold.telemetry import schema
from twofold.telemetry.queries.requests import Request
from twofold.telemetry.queries.runs import Database, Run, Window, runs, window

F64 = npt.NDArray[np.float64]

_MAX_RUNS = 1000
"""Newest runs among which the replicas are looked for."""
_REPLACED_WITHIN_S = 60.0


@dataclass(frozen=True)
class Decided:
    """Requests of a replica that the router sent there for one reason."""

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class FleetReplica:
    """One replica in a window of time."""

    run: Run
    num_unfinished: int
    """Requests without a finish reason."""
    decided: Mapping[RoutedBy, Decided]

    @property
    def total(self) -> Decided:
        every = self.decided.values()
        return Decided(
            sum(each.num_requests for each in every),
            sum(each.prompt_tokens for each in every),
            sum(each.cached_tokens for each in every),
            sum(each.completion_tokens for each in every),
        )

    @property
    def hit_share(self) -> float | None:
        """Prompt tokens that hit the prefix cache, 0 to 1; None without requests."""
        total = self.total
        return total.cached_tokens / total.prompt_tokens if total.prompt_tokens else None


def fleet_runs(db: Database, run: Run) -> list[Run]:
    """Runs that belong together with `run`, itself included, oldest first.

    Replicas of a fleet have an id and serve the same model. Servers without an id belong together because they share
    the database. In both cases their lifetimes overlap, directly or through further runs: a replica and its
    replacement may both have met a third one only.
    """
    alike = [
        each
        for each in runs(db, limit=_MAX_RUNS)
        if each.kind == run.kind
        and bool(each.replica) == bool(run.replica)
        and (not run.replica or each.model == run.model)
    ]
    # A replica that is lost alone is replaced a moment later.
    gap_s = _REPLACED_WITHIN_S if run.replica else 0.0
    begin_s, end_s = run.started_s, _ended_s(run)
    found: dict[int, Run] = {}
    while more := [
        each
        for each in alike
        if each.run_id not in found and each.started_s <= end_s + gap_s and begin_s <= _ended_s(each) + gap_s
    ]:
        found |= {each.run_id: each for each in more}
        begin_s = min(begin_s, *(each.started_s for each in more))
        end_s = max(end_s, *map(_ended_s, more))
    return [found[number] for number in sorted(found)]


def fleet_window(
    members: Sequence[Run], last_s: float | None = None, *, now_s: float | None = None
) -> Window:
    """As `window`, of all members together: from the begin of the first one to the end of the last one."""
    first = min(members, key=lambda each: each.started_s)
    last = max(members, key=lambda each: math.inf if each.is_live(now_s) else _ended_s(each))
    end_s = window(last, None, now_s=now_s).end_s
    begin_s = int(first.started_s)
    return Window(begin_s if last_s is None else max(begin_s, end_s - int(last_s)), end_s)


def fleet(db: Database, run: Run, span: Window) -> list[FleetReplica]:
    """Members of `fleet_runs` that lived in `span`, oldest first, with their requests submitted in it."""
    members = [
        each
        for each in fleet_runs(db, run)
        if each.started_s < span.end_s and (each.is_live() or _ended_s(each) >= span.begin_s)
    ]
    table = schema.request.c
    query = (
        select(
            table.run_id,
            table.routed_by,
            func.count(),
            func.sum(case((table.finish_reason.is_(None), 1), else_=0)),
            func.sum(table.prompt_tokens),
            func.sum(table.cached_tokens),
            func.sum(table.completion_tokens),
        )
        .where(table.run_id.in_([each.run_id for each in members]))
        .where(table.submitted_s >= span.begin_s, table.submitted_s < span.end_s)
        .group_by(table.run_id, table.routed_by)
    )
    unfinished = dict.fromkeys((each.run_id for each in members), 0)
    decided: dict[int, dict[RoutedBy, Decided]] = {each.run_id: {} for each in members}
    for run_id, reason, count, running, *tokens in db.rows(query):
        unfinished[run_id] += int(running)
        decided[run_id][reason] = Decided(int(count), *map(int, tokens))
    return [FleetReplica(each, unfinished[each.run_id], decided[each.run_id]) for each in members]


def _ended_s(run: Run) -> float:
    """Unix time of its end, or of its last sign of life."""
    return run.finished_s or run.last_seen_s


def traced(db: Database, trace_id: str, *, limit: int = 100) -> list[Request]:
    """Requests of all runs that came with this W3C trace id, in order of arrival."""
    table = schema.request
    query = select(table).where(table.c.trace_id == trace_id.strip().lower())
    return [Request(**row._mapping) for row in db.rows(query.order_by(table.c.received_s).limit(limit))]


@dataclass(frozen=True)
class StepCosts:
    """Measured steps of a run, [steps]."""

    num_decode: F64
    num_prefill: F64
    wall_s: F64


def step_costs(db: Database, run: Run, *, since_s: float = 0.0, limit: int = 50_000) -> StepCosts:
    """Tokens and wall time of the run's latest steps, begun at Unix time `since_s` or later."""
    table = schema.step.c
    query = select(table.num_decode_tokens, table.num_prefill_tokens, table.wall_us).where(
        table.run_id == run.run_id, table.started_s >= since_s
    )
    rows = np.array(
        [tuple(row) for row in db.rows(query.order_by(table.step.desc()).limit(limit))], np.float64
    )
    rows = rows.reshape(-1, 3)
    return StepCosts(rows[:, 0], rows[:, 1], rows[:, 2] / 1e6)


def finished_requests(db: Database, found: Sequence[Run], *, limit: int = 100_000) -> list[Request]:
    """Complete answers of several runs in order of arrival."""
    table = schema.request
    query = (
        select(table)
        .where(
            table.c.run_id.in_([run.run_id for run in found]), table.c.finish_reason.in_(("stop", "length"))
        )
        .order_by(table.c.received_s)
        .limit(limit)
    )
    return [Request(**row._mapping) for row in db.rows(query)]
