"""Queries on a telemetry database with typed results; large results are arrays.

The dashboard and the summary read through this package only. Every connection is read-only (`mode=ro`). Times `*_us`
and rates "per clock second" are on the run's clock: emulated where `Run.emulated` is true.
"""

from twofold.telemetry.queries.history import RunHistory
from twofold.telemetry.queries.loadtests import (
    LoadSamples,
    LoadTest,
    PercentileSeries,
    load_samples,
    load_tests,
    percentile_series,
)
from twofold.telemetry.queries.overview import (
    Overview,
    PlacementTotals,
    StepTotals,
    overview,
    placement_totals,
    step_totals,
)
from twofold.telemetry.queries.placements import (
    UNUSED,
    CacheEvent,
    PlacementGrid,
    Upload,
    cache_event_counts,
    cache_events,
    placement_grid,
    upload_counts,
    uploads,
)
from twofold.telemetry.queries.predictions import PredictionError, prediction_error
from twofold.telemetry.queries.requests import (
    RUNNING,
    Request,
    RequestCounts,
    RequestTokens,
    finish_reasons,
    num_requests,
    request_counts,
    request_tokens,
    requests,
)
from twofold.telemetry.queries.runs import (
    LIVE_AFTER_S,
    ControlEvent,
    Database,
    Dropped,
    Run,
    RunState,
    Window,
    control_events,
    dropped,
    open_database,
    run_totals,
    runs,
    window,
)
from twofold.telemetry.queries.step_times import StepTimes, step_times
from twofold.telemetry.sink import CacheEventKind, Placement, UploadReason

__all__ = [
    "LIVE_AFTER_S",
    "RUNNING",
    "UNUSED",
    "CacheEvent",
    "CacheEventKind",
    "ControlEvent",
    "Database",
    "Dropped",
    "LoadSamples",
    "LoadTest",
    "Overview",
    "PercentileSeries",
    "Placement",
    "PlacementGrid",
    "PlacementTotals",
    "PredictionError",
    "Request",
    "RequestCounts",
    "RequestTokens",
    "Run",
    "RunHistory",
    "RunState",
    "StepTimes",
    "StepTotals",
    "Upload",
    "UploadReason",
    "Window",
    "cache_event_counts",
    "cache_events",
    "control_events",
    "dropped",
    "finish_reasons",
    "load_samples",
    "load_tests",
    "num_requests",
    "open_database",
    "overview",
    "percentile_series",
    "placement_grid",
    "placement_totals",
    "prediction_error",
    "request_counts",
    "request_tokens",
    "requests",
    "run_totals",
    "runs",
    "step_times",
    "step_totals",
    "upload_counts",
    "uploads",
    "window",
]
