"""Expert copies over the link as arrays: bytes by reason, busy share of the link, waits, speed at the copy's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.telemetry.queries.layer_rows import StepRows
from twofold.telemetry.queries.native_events import events
from twofold.telemetry.queries.runs import Database, Run
from twofold.telemetry.sink import UploadReason

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

MAX_COPIES: Final = 50_000
"""Most copies that are analysed, the latest ones."""


@dataclass(frozen=True)
class CopyRows:
    """Host-to-device copies in the order in which they were decided; arrays are [copies].

    `*_us` are on the run's clock since its start.
    """

    step: I64
    layer: I64
    expert: I64
    slot: I64
    size_bytes: I64
    queued_us: F64
    begin_us: F64
    end_us: F64
    reason: I64
    lane: I64
    device: I64
    """Number of the device, from 0."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def copying_us(self) -> F64:
        return self.end_us - self.begin_us

    @property
    def waiting_us(self) -> F64:
        return self.begin_us - self.queued_us

    def where(self, chosen: npt.NDArray[np.bool_]) -> CopyRows:
        return CopyRows(*(getattr(self, name)[chosen] for name in CopyRows.__annotations__))


def copy_rows(db: Database, run: Run, steps: StepRows, *, limit: int = MAX_COPIES) -> CopyRows:
    """The latest `limit` copies that were decided in these steps."""
    first, last = (int(steps.step[0]), int(steps.step[-1])) if len(steps) else (0, -1)
    found = events(db, run, "upload", first_step=first, last_step=last)[-limit:]
    found = found[np.lexsort((found["queued_us"], found["step"]))]

    def column(name: str) -> npt.NDArray[Any]:
        values = found[name]
        return values.astype(np.float64 if name.endswith("_us") else np.int64)

    return CopyRows(*(column(name) for name in CopyRows.__annotations__))


@dataclass(frozen=True)
class ReasonTotals:
    """Copies of one reason. Medians are NaN where there are none."""

    reason: UploadReason
    num_copies: int
    num_bytes: int
    copying_us: float
    median_bytes: float
    median_wait_us: float

    @property
    def bytes_per_s(self) -> float:
        """While one of these copies is running; NaN where no copy took time."""
        return self.num_bytes / self.copying_us * 1e6 if self.copying_us > 0 else float("nan")


@dataclass(frozen=True)
class DeviceCopies:
    """Copies to one device over its own link."""

    device: int
    num_copies: int
    num_bytes: int
    copying_us: float
    """Time in which its link copied."""

    @property
    def bytes_per_s(self) -> float:
        """While the link copies; NaN where no copy took time."""
        return self.num_bytes / self.copying_us * 1e6 if self.copying_us > 0 else float("nan")


def copies_by_device(copies: CopyRows, num_devices: int) -> list[DeviceCopies]:
    """One entry per device."""
    found = []
    for device in range(num_devices):
        own = copies.where(copies.device == device)
        busy_us = float(_union_us(own).sum())
        found.append(DeviceCopies(device, len(own), int(own.size_bytes.sum()), busy_us))
    return found


def copies_by_reason(copies: CopyRows) -> list[ReasonTotals]:
    """One entry per reason, also for reasons without copies."""
    found = []
    for reason in UploadReason:
        own = copies.where(copies.reason == reason)
        found.append(
            ReasonTotals(
                reason,
                len(own),
                int(own.size_bytes.sum()),
                float(own.copying_us.sum()),
                float(np.median(own.size_bytes)) if len(own) else float("nan"),
                float(np.median(own.waiting_us)) if len(own) else float("nan"),
            )
        )
    return found


@dataclass(frozen=True)
class LinkSeries:
    """The link over time, in buckets of equally many steps; arrays are [buckets], NaN where no step took time."""

    at_s: F64
    """Unix time of each bucket's first step."""
    bytes_per_clock_s: F64
    """[3, buckets] by reason, per second that the run's clock spent in steps."""
    busy_share: F64
    """Share of the steps' clock time in which the link copied; 1: it never rested."""


def link_series(copies: CopyRows, steps: StepRows, *, max_buckets: int = 120) -> LinkSeries:
    """Copies per time spent in steps, each counted while it ran. In runs that did not record when steps began, a copy
    counts for the step that decided it."""
    num = min(max_buckets, len(steps))
    bucket_of_step = np.arange(len(steps)) * num // max(1, len(steps))
    clock_us = np.bincount(bucket_of_step, steps.step_us, num)
    own_us = _union_us(copies)
    by_step = _by_time if not np.isnan(steps.begin_us).any() else _by_decision
    num_bytes = np.stack(
        [by_step(copies.where(copies.reason == reason), steps, None) for reason in UploadReason]
    )
    busy_us = by_step(copies, steps, own_us)
    first = np.searchsorted(bucket_of_step, np.arange(num))
    with np.errstate(divide="ignore", invalid="ignore"):
        per_us = np.where(clock_us > 0, 1.0 / clock_us, np.nan)
    in_buckets = [np.bincount(bucket_of_step, values, num) for values in (*num_bytes, busy_us)]
    return LinkSeries(
        at_s=steps.started_s[first] if num else np.zeros(0),
        bytes_per_clock_s=np.asarray(np.array(in_buckets[:-1]) * per_us * 1e6, np.float64),
        busy_share=np.minimum(np.asarray(in_buckets[-1] * per_us, np.float64), 1.0),
    )


def _by_decision(copies: CopyRows, steps: StepRows, amounts: F64 | None) -> F64:
    """[steps] sums of `amounts`, by default bytes, of the copies that each step decided."""
    at = np.searchsorted(steps.step, copies.step)
    known = at < len(steps)
    known[known] = steps.step[at[known]] == copies.step[known]
    amounts = copies.size_bytes.astype(np.float64) if amounts is None else amounts
    return np.asarray(np.bincount(at[known], amounts[known], len(steps)), np.float64)


def _by_time(copies: CopyRows, steps: StepRows, amounts: F64 | None) -> F64:
    """[steps] `amounts`, by default bytes, that went over the link while each step ran.

    amounts: of the last part of each copy, in us: the link's own time (`_union_us`).
    """
    if not len(copies):
        return np.zeros(len(steps))
    end = copies.end_us
    begin = copies.begin_us if amounts is None else end - amounts
    taken = np.maximum(end - begin, 1e-3)
    rate = copies.size_bytes / taken if amounts is None else np.where(amounts > 0, 1.0, 0.0)
    at = np.concatenate([begin, begin + taken])
    order = np.argsort(at, kind="stable")
    rates = np.cumsum(np.concatenate([rate, -rate])[order])
    copied = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(at[order]))])
    until, since = (
        np.interp(moment, at[order], copied) for moment in (steps.begin_us + steps.step_us, steps.begin_us)
    )
    return np.asarray(until - since, np.float64)


def _union_us(copies: CopyRows) -> F64:
    """Copying time of each copy without the time that an earlier copy already covers."""
    order = np.argsort(copies.begin_us, kind="stable")
    begin, end = copies.begin_us[order], copies.end_us[order]
    covered = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    own = np.empty(len(copies))
    own[order] = np.maximum(end - np.maximum(begin, covered), 0.0)
    return own


@dataclass(frozen=True)
class LinkCeiling:
    """Calibrated link: a copy of W bytes takes latency_us + W / bandwidth."""

    latency_us: float
    bandwidth_gbps: float

    def bytes_per_s(self, size_bytes: F64 | float) -> F64:
        """Highest rate for back-to-back copies of this size."""
        size = np.asarray(size_bytes, np.float64)
        took_us = self.latency_us + size / (self.bandwidth_gbps * 1e3)
        return np.asarray(size / took_us * 1e6, np.float64)
