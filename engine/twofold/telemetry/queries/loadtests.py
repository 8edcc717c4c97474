"""Load-test results as seen by users: TTFT, TPOT, end-to-end times and failures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.runs import Database

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LoadTest:
    """One load test; `run_id` is the run it was sent to."""

    loadtest_id: str
    run_id: int | None
    begin_s: float
    end_s: float
    num_samples: int
    num_failures: int
    max_users: int
    completion_tokens: int
    plan_json: str | None = None
    """As `LoadTestPlan.facts_json`; None for a test that recorded none."""


def load_tests(db: Database, *, limit: int = 50) -> list[LoadTest]:
    """Load tests, newest first."""
    table = schema.load_sample.c
    end_s = func.max(table.finished_s)
    query = (
        select(
            table.loadtest_id,
            func.max(table.run_id),
            func.min(table.finished_s - table.e2e_ms / 1000.0),
            end_s,
            func.count(),
            func.sum(1 - table.ok),
            func.max(table.num_users),
            func.sum(table.completion_tokens),
            func.max(table.plan_json),
        )
        .group_by(table.loadtest_id)
        .order_by(end_s.desc())
        .limit(limit)
    )
    return [LoadTest(*row) for row in db.rows(query)]


@dataclass(frozen=True)
class LoadSamples:
    """All samples of one load test by time; arrays are [samples], milliseconds of the client's wall clock."""

    finished_s: F64
    user: I64
    num_users: I64
    e2e_ms: F64
    ok: npt.NDArray[np.bool_]
    ttft_ms: F64
    """NaN where no token came."""
    tpot_ms: F64
    """NaN with fewer than two tokens."""
    completion_tokens: I64
    itl_p95_ms: F64
    """Percentile of each answer's own inter-token times; NaN with fewer than two tokens."""
    gave_up: npt.NDArray[np.bool_]
    """The user closed the connection on purpose; such a sample is `ok`, its e2e_ms is no answer's."""
    stage: list[str]
    """"" where the test had no stages."""
    name: list[str]
    """Kind of user; "" for `twofold bench serve`."""
    errors: list[str]
    """Errors of the failed samples."""
    prompt_tokens: I64
    """0 where unknown."""
    itls_ms: list[list[float]]
    """Inter-token times of each answer; empty for failures and older tests."""


_NUMBERS: Final = {
    **dict.fromkeys(("finished_s", "e2e_ms", "ttft_ms", "tpot_ms", "itl_p95_ms"), np.float64),
    **dict.fromkeys(("user", "num_users", "completion_tokens", "prompt_tokens"), np.int64),
    **dict.fromkeys(("ok", "gave_up"), np.bool_),
}
_TEXTS: Final = ("stage", "name", "error", "itls_json")


def load_samples(db: Database, loadtest_id: str) -> LoadSamples:
    table = schema.load_sample.c
    chosen = [func.coalesce(table[name], 0) if name == "prompt_tokens" else table[name] for name in _NUMBERS]
    chosen += [table[name] for name in _TEXTS]
    query = select(*chosen).where(table.loadtest_id == loadtest_id)
    # By column: a row's attribute takes a microsecond, and a long test has 10,000 rows of 13.
    columns = list(zip(*db.rows(query.order_by(table.finished_s)), strict=True)) or [()] * (
        len(_NUMBERS) + len(_TEXTS)
    )
    # None becomes NaN.
    numbers: dict[str, Any] = {
        name: np.array(column, _NUMBERS[name]) for name, column in zip(_NUMBERS, columns, strict=False)
    }
    stage, name, error, itls = columns[len(_NUMBERS) :]
    return LoadSamples(
        **numbers,
        stage=[each or "" for each in stage],
        name=[each or "" for each in name],
        errors=[each or "unknown" for each, ok in zip(error, numbers["ok"], strict=True) if not ok],
        itls_ms=[json.loads(each) if each else [] for each in itls],
    )


@dataclass(frozen=True)
class PercentileSeries:
    """Percentiles over time; arrays are [buckets], NaN where a bucket has no sample."""

    at_s: F64
    p50: F64
    p95: F64
    p99: F64


def percentile_series(at_s: F64, values: F64, *, max_buckets: int = 60) -> PercentileSeries:
    """Percentiles of samples (at_s, values) per bucket of equal length; NaN values are ignored."""
    known = ~np.isnan(values)
    at_s, values = at_s[known], values[known]
    if not len(values):
        empty = np.zeros(0)
        return PercentileSeries(empty, empty, empty, empty)
    bucket_s = max(1.0, float(np.ceil((at_s.max() - at_s.min() + 1e-9) / max_buckets)))
    bucket = ((at_s - at_s.min()) // bucket_s).astype(np.int64)
    table = np.full((3, int(bucket.max()) + 1), np.nan)
    for index in np.unique(bucket).tolist():
        table[:, index] = np.percentile(values[bucket == index], (50, 95, 99))
    starts = at_s.min() + bucket_s * np.arange(table.shape[1])
    return PercentileSeries(starts, *table)
