"""Queries on a telemetry database with typed results; large results are arrays.

The dashboard and the summary read through this package only. Every connection is read-only (`mode=ro`). Times `*_us`
and rates "per clock second" are on the run's clock: emulated where `Run.emulated` is true.
"""

from twofold.api.types import ControlRecord as ControlRecord
from twofold.telemetry.queries.history import RunHistory as RunHistory
from twofold.telemetry.queries.loadtests import LoadSamples as LoadSamples
from twofold.telemetry.queries.loadtests import LoadTest as LoadTest
from twofold.telemetry.queries.loadtests import PercentileSeries as PercentileSeries
from twofold.telemetry.queries.loadtests import load_samples as load_samples
from twofold.telemetry.queries.loadtests import load_tests as load_tests
from twofold.telemetry.queries.loadtests import percentile_series as percentile_series
from twofold.telemetry.queries.overview import Overview as Overview
from twofold.telemetry.queries.overview import PlacementTotals as PlacementTotals
from twofold.telemetry.queries.overview import StepTotals as StepTotals
from twofold.telemetry.queries.overview import placement_totals as placement_totals
from twofold.telemetry.queries.overview import step_totals as step_totals
from twofold.telemetry.queries.placements import UNUSED as UNUSED
from twofold.telemetry.queries.placements import PlacementGrid as PlacementGrid
from twofold.telemetry.queries.placements import Upload as Upload
from twofold.telemetry.queries.placements import cache_event_counts as cache_event_counts
from twofold.telemetry.queries.placements import upload_counts as upload_counts
from twofold.telemetry.queries.placements import uploads as uploads
from twofold.telemetry.queries.predictions import PredictionError as PredictionError
from twofold.telemetry.queries.predictions import prediction_error as prediction_error
from twofold.telemetry.queries.requests import RUNNING as RUNNING
from twofold.telemetry.queries.requests import Request as Request
from twofold.telemetry.queries.requests import RequestCounts as RequestCounts
from twofold.telemetry.queries.requests import RequestTokens as RequestTokens
from twofold.telemetry.queries.requests import finish_reasons as finish_reasons
from twofold.telemetry.queries.requests import num_requests as num_requests
from twofold.telemetry.queries.requests import request_counts as request_counts
from twofold.telemetry.queries.requests import request_tokens as request_tokens
from twofold.telemetry.queries.requests import requests as requests
from twofold.telemetry.queries.runs import LIVE_AFTER_S as LIVE_AFTER_S
from twofold.telemetry.queries.runs import Database as Database
from twofold.telemetry.queries.runs import Dropped as Dropped
from twofold.telemetry.queries.runs import Run as Run
from twofold.telemetry.queries.runs import RunState as RunState
from twofold.telemetry.queries.runs import Window as Window
from twofold.telemetry.queries.runs import control_events as control_events
from twofold.telemetry.queries.runs import dropped as dropped
from twofold.telemetry.queries.runs import open_database as open_database
from twofold.telemetry.queries.runs import run_totals as run_totals
from twofold.telemetry.queries.runs import runs as runs
from twofold.telemetry.queries.runs import window as window
from twofold.telemetry.queries.step_times import StepTimes as StepTimes
from twofold.telemetry.queries.step_times import step_times as step_times
from twofold.telemetry.sink import CacheEventKind as CacheEventKind
from twofold.telemetry.sink import Placement as Placement
from twofold.telemetry.sink import UploadReason as UploadReason
