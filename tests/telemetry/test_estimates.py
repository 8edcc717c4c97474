"""Prediction error in telemetry: per layer, not per token, and never of a virtual clock."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from twofold.api.types import RunInfo
from twofold.telemetry import queries
from twofold.telemetry.sink import TOKEN_LAYER_DTYPE
from twofold.telemetry.summary import format_summary, summarise
from twofold.telemetry.writer import open_sink

RUN = RunInfo("m", "A", "none", "", "wall", "", 2, 8, 2, 0, 1, "generic", 1, "0", "{}")


def rows(step, predicted, measured, tokens=1):
    events = np.zeros(tokens * len(predicted), TOKEN_LAYER_DTYPE)
    for i, (p, m) in enumerate(zip(predicted, measured, strict=True)):
        part = events[i * tokens : (i + 1) * tokens]
        part["step"], part["layer"], part["position"] = step, i, np.arange(tokens)
        part["predicted_us"], part["layer_us"], part["num_routed"] = p, m, 2
    return events


def record(tmp_path, run, events):
    url = f"sqlite:///{tmp_path / 't.db'}"
    sink = open_sink(url)
    sink.begin_run(run)
    for part in events:
        sink.native_events("token_layer", part)
    sink.close()
    return url


def test_each_layer_counts_once_however_many_tokens_it_had(tmp_path):
    # Errors: 0.1, 0.2 with one token each; 0.5 once with fifty tokens.
    url = record(tmp_path, RUN, [rows(0, [90, 120], [100, 100]), rows(1, [50], [100], tokens=50)])
    db = queries.open_database(url)
    error = queries.estimate_error(db, queries.runs(db)[0])
    assert error.num_layers == 3
    assert error.median == pytest.approx(0.2)
    assert summarise(url)["prediction_error_median"] == pytest.approx(0.2)
    assert "20.0% median error" in format_summary(summarise(url))


@pytest.mark.parametrize(
    "run", [RUN, dataclasses.replace(RUN, accelerator="emulated:rtx4090-pcie4", clock="virtual")]
)
def test_no_estimates_or_a_virtual_clock_give_no_figure(tmp_path, run):
    predicted = 0 if run is RUN else 90
    url = record(tmp_path, run, [rows(0, [predicted], [100])])
    assert summarise(url)["prediction_error_median"] is None
