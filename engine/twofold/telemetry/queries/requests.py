"""Requests of a run, and the per-layer data of each token of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, func, or_, select

from twofold.api.request_record import RequestFacts
from twofold.telemetry import schema
from twofold.telemetry.queries.native_events import events
from twofold.telemetry.queries.runs import Database, Run

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Request(RequestFacts):
    """One request of a run as the engine recorded it."""

    run_id: int
    sampling_json: str


RUNNING: Final = "running"
"""Filter value for requests without a finish reason yet."""


def requests(
    db: Database,
    run: Run,
    *,
    search: str = "",
    ended_by: str | None = None,
    limit: int = 200,
    offset: int = 0,
    order_by: ColumnElement[Any] | None = None,
) -> list[Request]:
    """Requests, newest first, skipping `offset`.

    search: a number, a part of the id, a trace id, or an adapter. ended_by: a finish reason, or RUNNING. order_by:
    largest value of this first, unknown ones last.
    """
    table = schema.request
    order = [] if order_by is None else [order_by.desc().nulls_last()]
    query = select(table).where(*_matching(run, search, ended_by)).order_by(*order, table.c.number.desc())
    return [Request(**row._mapping) for row in db.rows(query.limit(limit).offset(offset))]


def request(db: Database, run: Run, number: int) -> Request | None:
    """One request; None if the run has none of this number."""
    table = schema.request
    rows = db.rows(select(table).where(table.c.run_id == run.run_id, table.c.number == number))
    return Request(**rows[0]._mapping) if rows else None


def num_requests(db: Database, run: Run, *, search: str = "", ended_by: str | None = None) -> int:
    """Number of all requests that `requests` returns page by page."""
    ((count,),) = db.rows(
        select(func.count()).select_from(schema.request).where(*_matching(run, search, ended_by))
    )
    return int(count)


def _matching(run: Run, search: str, ended_by: str | None) -> list[ColumnElement[bool]]:
    table = schema.request.c
    conditions: list[ColumnElement[bool]] = [table.run_id == run.run_id]
    if search := search.strip():
        part_of_id = table.request_id.icontains(search, autoescape=True)
        named = or_(part_of_id, table.trace_id == search, table.adapter == search)
        # SQLite's integers have 64 bits; a longer number can only be part of an id.
        is_number = search.isascii() and search.isdigit() and len(search) < 19
        conditions.append(or_(table.number == int(search), named) if is_number else named)
    if ended_by is not None:
        reason = None if ended_by == RUNNING else ended_by
        conditions.append(table.finish_reason.is_(None) if reason is None else table.finish_reason == reason)
    return conditions


def finish_reasons(db: Database, run: Run) -> list[str]:
    """Finish reasons of the run's requests, including RUNNING; sorted."""
    table = schema.request.c
    query = select(table.finish_reason).where(table.run_id == run.run_id).distinct()
    return sorted(RUNNING if reason is None else str(reason) for (reason,) in db.rows(query))


@dataclass(frozen=True)
class RequestCounts:
    """Requests of a run by state."""

    total: int
    finished: int
    """Finished with "stop" or "length"."""
    failed: int
    """Finished with "error"."""
    cancelled: int
    """Cancelled by the client."""

    @property
    def unfinished(self) -> int:
        """Still running; permanently so if the run was interrupted."""
        return self.total - self.finished - self.failed - self.cancelled


def request_counts(db: Database, run: Run) -> RequestCounts:
    table = schema.request.c
    query = select(table.finish_reason, func.count()).where(table.run_id == run.run_id)
    counts = {reason: int(count) for reason, count in db.rows(query.group_by(table.finish_reason))}
    failed, cancelled, unfinished = (counts.pop(reason, 0) for reason in ("error", "cancelled", None))
    finished = sum(counts.values())
    return RequestCounts(finished + failed + cancelled + unfinished, finished, failed, cancelled)


@dataclass(frozen=True)
class RequestTokens:
    """Data of each MoE layer for each token of one request. T tokens, L layers, k experts.

    A position computed twice (after a preemption) appears as its last computation. Entries of [T, L] without a row
    (dropped events) have 0 routed experts and NaN times.
    """

    position: I64
    """[T] ascending"""
    step: I64
    """[T]"""
    started_s: F64
    """[T] Unix time of the step, NaN where its row was lost."""
    step_us: F64
    """[T] on the run's clock, NaN where the step's row was lost."""
    wall_us: F64
    """[T] wall time of the step, NaN where its row was lost."""
    batch_tokens: I64
    """[T] tokens computed in the same step."""
    num_by_placement: I64
    """[T, L, 3] by `Placement`"""
    layer_us: F64
    """[T, L], as are the next three: times of the whole layer in that step, on the run's clock."""
    cpu_us: F64
    gpu_us: F64
    predicted_us: F64
    experts: npt.NDArray[np.int32]
    """[T, L, k] by descending router weight, -1 where not routed."""
    placement: npt.NDArray[np.int8]
    """[T, L, k], -1 where not routed."""
    weights: npt.NDArray[np.float32]
    """[T, L, k], 0 where not routed."""


def request_tokens(
    db: Database, run: Run, number: int, *, first_position: int = 0, last_position: int | None = None
) -> RequestTokens:
    """Placements and layer times of one request's tokens, by position (prompt first)."""
    rows = events(db, run, "token_layer", request=number)
    chosen = rows["position"] >= first_position
    if last_position is not None:
        chosen &= rows["position"] <= last_position
    rows = rows[chosen]
    positions, token = np.unique(rows["position"].astype(np.int64), return_inverse=True)
    num_layers = max(run.num_layers, int(rows["layer"].max(initial=-1)) + 1)
    top_k = max(run.top_k, int(rows["num_routed"].max(initial=0)))
    shape = (len(positions), num_layers)
    # A position computed twice shows its last computation: rows ascend by step, and numpy keeps the last of equals.
    at = (token, rows["layer"])
    num_by_placement = np.zeros((*shape, 3), np.int64)
    num_by_placement[at] = np.stack([rows[name] for name in ("num_hits", "num_cpu", "num_fetched")], axis=1)
    times = np.full((4, *shape), np.nan)
    for index, name in enumerate(("layer_us", "cpu_us", "gpu_us", "predicted_us")):
        times[index][at] = rows[name]
    routed = np.arange(top_k) < rows["num_routed"][:, None]
    experts = np.full((*shape, top_k), -1, np.int32)
    experts[at] = np.where(routed, rows["experts"][:, :top_k].astype(np.int32), -1)
    placement = np.full((*shape, top_k), -1, np.int8)
    placement[at] = np.where(routed, rows["placement"][:, :top_k].astype(np.int8), -1)
    weights = np.zeros((*shape, top_k), np.float32)
    weights[at] = np.where(routed, rows["weights"][:, :top_k], 0)
    steps = np.zeros(len(positions), np.int64)
    steps[token] = rows["step"]
    by_step = {row.step: row for row in _steps(db, run, steps)}
    found = [by_step.get(step) for step in steps.tolist()]
    return RequestTokens(
        position=positions,
        step=steps,
        started_s=np.array([row.started_s if row else np.nan for row in found], np.float64),
        step_us=np.array([row.step_us if row else np.nan for row in found], np.float64),
        wall_us=np.array([row.wall_us if row else np.nan for row in found], np.float64),
        batch_tokens=np.array(
            [row.num_prefill_tokens + row.num_decode_tokens if row else 0 for row in found], np.int64
        ),
        num_by_placement=num_by_placement,
        layer_us=times[0],
        cpu_us=times[1],
        gpu_us=times[2],
        predicted_us=times[3],
        experts=experts,
        placement=placement,
        weights=weights,
    )


def _steps(db: Database, run: Run, steps: I64) -> list[Any]:
    if not len(steps):
        return []
    table = schema.step
    first, last = int(steps.min()), int(steps.max())
    return db.rows(select(table).where(table.c.run_id == run.run_id, table.c.step.between(first, last)))
