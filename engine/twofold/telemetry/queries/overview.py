"""Time series of a run: tokens/s, hit rate, bytes over PCIe, queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, and_, case, cast, func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database, Run, Window, run_totals
from twofold.telemetry.queries.step_times import STEP_PARTS
from twofold.telemetry.sink import Placement
from twofold.telemetry.totals import LAYER_TOTALS, STEP_TOTALS

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlacementTotals:
    """Where routed experts ran, and how many were copied."""

    has_slots: bool
    """Whether the run has expert slots on a GPU."""
    num_hits: int
    num_cpu: int
    num_fetched: int
    num_uploads: int
    upload_bytes: int

    @property
    def num_routed(self) -> int:
        return self.num_hits + self.num_cpu + self.num_fetched

    @property
    def hit_rate(self) -> float | None:
        """Hits among routed experts; None if nothing was routed or there is no expert cache."""
        return self.num_hits / self.num_routed if self.num_routed and self.has_slots else None


def placement_totals(db: Database, run: Run) -> PlacementTotals:
    """Placement totals of the whole run."""
    totals = run_totals(db, run)
    return PlacementTotals(run.has_slots, *(int(totals[name]) for name in LAYER_TOTALS))


@dataclass(frozen=True)
class StepTotals:
    """Step totals of a run or window; the `decode_only` figures cover steps without prefill."""

    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    """Without rejected drafted tokens: those that became part of an answer."""
    decode_only_tokens: int
    decode_only_clock_us: float
    decode_only_wall_us: float

    @property
    def decode_tokens_per_clock_s(self) -> float | None:
        return (
            self.decode_only_tokens / self.decode_only_clock_us * 1e6 if self.decode_only_clock_us else None
        )

    @property
    def decode_tokens_per_wall_s(self) -> float | None:
        return self.decode_only_tokens / self.decode_only_wall_us * 1e6 if self.decode_only_wall_us else None


def step_totals(db: Database, run: Run) -> StepTotals:
    """Step totals of the whole run."""
    totals = run_totals(db, run)
    counts, times = STEP_TOTALS[:4], STEP_TOTALS[4:]
    return StepTotals(*(int(totals[name]) for name in counts), *(totals[name] for name in times))


@dataclass(frozen=True)
class LostSteps:
    """Consecutive steps that ran and whose rows were lost: between the steps before and after them."""

    begin_s: float
    end_s: float
    """Unix time at which the next recorded step began."""
    num_steps: int


def lost_steps(db: Database, run: Run, span: Window, *, limit: int = 200) -> list[LostSteps]:
    """The latest gaps in the steps' numbers, in order. Without lost steps it costs one row."""
    table = schema.dropped.c
    lost = select(func.sum(table.num_events)).where(table.run_id == run.run_id, table.kind == "step")
    if not db.rows(lost)[0][0]:
        return []
    step = schema.step.c
    before = {
        name: func.lag(step[name]).over(order_by=step.step).label(f"last_{name}")
        for name in ("step", "started_s")
    }
    rows = (
        select(step.step, step.started_s, *before.values())
        .where(step.run_id == run.run_id)
        .where(step.started_s >= float(span.begin_s), step.started_s < float(span.end_s))
        .subquery()
        .c
    )
    gaps = select(rows.last_started_s, rows.started_s, rows.step - rows.last_step - 1)
    gaps = gaps.where(rows.step > rows.last_step + 1).order_by(rows.step.desc()).limit(limit)
    return [LostSteps(*row) for row in reversed(db.rows(gaps))]


@dataclass(frozen=True)
class Overview:
    """Time series of a window in buckets. Arrays are [buckets]; hit_rate and clock rates are NaN without activity."""

    window: Window
    bucket_s: int
    at_s: F64
    """Unix time of each bucket's start."""
    decode_tokens_per_s: F64
    """Per wall second."""
    prefill_tokens_per_s: F64
    """Per wall second."""
    decode_tokens_per_clock_s: F64
    """Decode-only steps, per second of the run's clock: the speed of the machine that is shown."""
    step_us: F64
    """Mean, on the run's clock."""
    uses: F64
    """[3, buckets] routed experts by `Placement`."""
    upload_bytes_per_s: F64
    """Per wall second."""
    upload_bytes_per_clock_s: F64
    """Per second of the run's clock spent in steps."""
    num_running: F64
    """Mean over the bucket's steps, 0 when idle."""
    num_waiting: F64
    kv_use: F64
    """Mean share of the KV pages in use after the bucket's steps; NaN where none or not recorded."""
    num_preemptions: F64
    """Sequences preempted."""
    clock_s: float
    """Time spent in steps on the run's clock."""
    part_seconds: dict[str, F64]
    """[buckets] wall seconds of steps by the names of STEP_PARTS and "rest", largest first; only parts with time."""
    steps: StepTotals
    totals: PlacementTotals
    lost: Sequence[LostSteps] = ()
    """Where steps were lost; see `without_lost`."""

    @property
    def hit_rate(self) -> F64:
        """[buckets]"""
        return np.asarray(self.shares[Placement.HIT], np.float64)

    @property
    def shares(self) -> F64:
        """[3, buckets] of routed experts by `Placement`, summing to 1; NaN where nothing was routed."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.uses / self.uses.sum(axis=0), np.float64)

    def without_lost(self, lost: Sequence[LostSteps]) -> Overview:
        """The same with NaN instead of 0 where steps were lost and none was recorded."""
        idle = np.isnan(self.step_us)
        gone = np.zeros(len(self.at_s), bool)
        for each in lost:
            gone |= idle & (self.at_s + self.bucket_s > each.begin_s) & (self.at_s < each.end_s)

        def shown(values: F64) -> F64:
            return np.where(gone, np.nan, values)

        return replace(
            self,
            lost=tuple(lost),
            decode_tokens_per_s=shown(self.decode_tokens_per_s),
            prefill_tokens_per_s=shown(self.prefill_tokens_per_s),
            upload_bytes_per_s=shown(self.upload_bytes_per_s),
            num_running=shown(self.num_running),
            num_waiting=shown(self.num_waiting),
            num_preemptions=shown(self.num_preemptions),
        )

    @property
    def mean_upload_bytes_per_clock_s(self) -> float | None:
        return self.totals.upload_bytes / self.clock_s if self.clock_s > 0 else None


def bucket_length_s(span: Window, max_buckets: int) -> tuple[int, int]:
    """Whole seconds of a bucket, and how many of them cover the window: at most `max_buckets`."""
    length_s = span.end_s - span.begin_s
    bucket_s = max(1, -(-length_s // max_buckets))
    return bucket_s, -(-length_s // bucket_s)


def overview_of(run: Run, span: Window, bucket_s: int, steps: F64, layers: F64) -> Overview:
    """Build the overview from sums per bucket: STEP_SUMS and PART_SUMS as [columns, buckets], LAYER_TOTALS likewise."""
    steps, parts_us = steps[: len(STEP_SUMS)], steps[len(STEP_SUMS) :]
    count, decode, prefill, clock_us, running, waiting, only_tokens, only_us, only_wall_us = steps[:9]
    kv_use, kv_steps, preempted = steps[9:]
    hits, cpu, fetched, _, uploaded = layers
    with np.errstate(divide="ignore", invalid="ignore"):
        return Overview(
            window=span,
            bucket_s=bucket_s,
            at_s=span.begin_s + bucket_s * np.arange(len(count), dtype=np.float64),
            decode_tokens_per_s=decode / bucket_s,
            prefill_tokens_per_s=prefill / bucket_s,
            decode_tokens_per_clock_s=np.where(only_us > 0, only_tokens / only_us * 1e6, np.nan),
            step_us=np.where(count > 0, clock_us / count, np.nan),
            uses=np.stack([hits, cpu, fetched]),
            upload_bytes_per_s=uploaded / bucket_s,
            upload_bytes_per_clock_s=np.where(clock_us > 0, uploaded / clock_us * 1e6, np.nan),
            num_running=np.where(count > 0, running / count, 0.0),
            num_waiting=np.where(count > 0, waiting / count, 0.0),
            kv_use=np.where(kv_steps > 0, kv_use / kv_steps, np.nan),
            num_preemptions=preempted,
            clock_s=float(clock_us.sum()) / 1e6,
            part_seconds=_part_seconds(parts_us),
            steps=StepTotals(
                *(int(column.sum()) for column in (count, prefill, decode, only_tokens)),
                *(float(column.sum()) for column in (only_us, only_wall_us)),
            ),
            totals=PlacementTotals(run.has_slots, *(int(column.sum()) for column in layers)),
        )


def _part_seconds(parts_us: F64) -> dict[str, F64]:
    # A device's own clock may count slightly more than the wall clock.
    rest = np.maximum(parts_us[0] - parts_us[1:].sum(axis=0), 0.0)
    seconds = dict(zip((*STEP_PARTS, "rest"), np.vstack([parts_us[1:], rest]) / 1e6, strict=True))
    found = [name for name in seconds if seconds[name].any()]
    return {name: seconds[name] for name in sorted(found, key=lambda name: -seconds[name].sum())}


def _only_decode() -> ColumnElement[bool]:
    step = schema.step.c
    return and_(step.num_prefill_tokens == 0, step.num_decode_tokens > 0)


_DECODED: Final = (
    schema.step.c.num_decode_tokens - schema.step.c.num_drafted_tokens + schema.step.c.num_accepted_tokens
)
"""Decode tokens of a step without the drafted ones that were rejected."""
STEP_SUMS = (
    func.count(),
    func.sum(_DECODED),
    func.sum(schema.step.c.num_prefill_tokens),
    func.sum(schema.step.c.step_us),
    func.sum(schema.step.c.num_running),
    func.sum(schema.step.c.num_waiting),
    func.sum(case((_only_decode(), _DECODED), else_=0)),
    func.sum(case((_only_decode(), schema.step.c.step_us), else_=0.0)),
    func.sum(case((_only_decode(), schema.step.c.wall_us), else_=0.0)),
    func.coalesce(func.sum(schema.step.c.kv_use), 0.0),
    func.count(schema.step.c.kv_use),
    func.coalesce(func.sum(schema.step.c.num_preemptions), 0),
)


PART_SUMS = tuple(func.sum(schema.step.c[f"{name}_us"]) for name in ("wall", *STEP_PARTS))


def newest_step(db: Database, run: Run) -> int | None:
    """Number of the run's last step; None before the first one."""
    step = schema.step.c
    ((number,),) = db.rows(select(func.max(step.step)).where(step.run_id == run.run_id))
    return None if number is None else int(number)


def step_sums(
    db: Database,
    run: Run,
    *,
    after_step: int = -1,
    until_step: int | None = None,
    between_s: tuple[int, int] | None = None,
) -> tuple[int, I64, F64]:
    """Steps after `after_step`, up to `until_step`, begun in seconds from the first up to before the second.

    Returns the last one's number, their start seconds [n], STEP_SUMS and PART_SUMS [n, all].
    """
    step = schema.step.c
    # SQLite cuts fractions off, PostgreSQL rounds them.
    seconds = step.started_s if db.is_file else func.floor(step.started_s)
    second = cast(seconds, schema.INTEGER)
    query = select(func.max(step.step), second, *STEP_SUMS, *PART_SUMS).where(
        step.run_id == run.run_id, step.step > after_step
    )
    if until_step is not None:
        query = query.where(step.step <= until_step)
    if between_s is not None:
        begin_s, end_s = map(float, between_s)
        query = query.where(step.started_s >= begin_s, step.started_s < end_s)
    rows = np.array([tuple(row) for row in db.rows(query.group_by(second))], np.float64)
    rows = rows.reshape(-1, 2 + len(STEP_SUMS) + len(PART_SUMS))
    return int(rows[:, 0].max(initial=-1)), rows[:, 1].astype(np.int64), rows[:, 2:]
