"""Figures of a load against values worked out by hand, arrivals against their distribution, addresses."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.tools.loadgen import report
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.arrivals import arrival_times, arrivals_within
from twofold.tools.loadgen.http_client import check_url
from twofold.tools.loadgen.metrics import Run, Sample, percentile
from twofold.tools.loadgen.slo import limits


def answer(
    sent_s: float, *piece_s: float, end_s: float, prompt: int = 10, cached: int | None = None
) -> AnswerStream:
    """A whole answer whose pieces came so many seconds after it was sent, a token each."""
    moments = [sent_s + at for at in piece_s]
    return AnswerStream(
        sent_s,
        pieces=["x"] * len(moments),
        piece_s=moments,
        prompt_tokens=prompt,
        cached_tokens=cached,
        finish_reason="stop",
        end_s=sent_s + end_s,
    )


GOOD = (
    # TTFT 100, gaps 20 and 40, E2EL 160, TPOT (160 - 100) / 2 = 30.
    Sample(0, 1, answer(0.0, 0.1, 0.12, 0.16, end_s=0.16)),
    # TTFT 300, one gap of 50, E2EL 350, TPOT 50.
    Sample(1, 1, answer(1.0, 0.3, 0.35, end_s=0.35)),
    # One token: no gap and no TPOT.
    Sample(2, 1, answer(1.0, 0.2, end_s=0.2), waited_s=0.5),
)
FAILED = tuple(
    Sample(3 + number, 1, AnswerStream(2.0), 0.0, kind, f"message {number}")
    for number, kind in enumerate(("HTTP 429", "timeout", "HTTP 429"))
)


def test_every_figure_is_what_a_person_works_out() -> None:
    figures = Run((*GOOD, *FAILED), 4.0, limits({"ttft": 250, "tpot": 40})).figures()
    expected = {
        "duration": 4.0,
        "completed": 3,
        "failed": 3,
        "total_input_tokens": 30,
        "total_output_tokens": 6,
        "request_throughput": 0.75,
        "request_goodput": 0.5,
        "output_throughput": 1.5,
        "total_token_throughput": 9.0,
        "max_waited_at_client_ms": 500,
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "p90_ttft_ms": 280,
        "p95_ttft_ms": 290,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 40,
        "median_tpot_ms": 40,
        "p90_tpot_ms": 48,
        "mean_itl_ms": 110 / 3,
        "median_itl_ms": 40,
        "p99_itl_ms": 49.8,
        "mean_e2el_ms": 710 / 3,
        "median_e2el_ms": 200,
        "p90_e2el_ms": 320,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["errors"] == [
        {"kind": "HTTP 429", "count": 2, "first": "message 0"},
        {"kind": "timeout", "count": 1, "first": "message 1"},
    ]
    assert figures["turns"] == []


@pytest.mark.parametrize(
    ("slos", "per_second"),
    [
        ({}, None),
        ({"ttft": 301}, 3),
        ({"ttft": 299}, 2),
        ({"tpot": 31}, 2),
        ({"tpot": 29}, 1),
        ({"e2el": 351}, 3),
        ({"ttft": 101, "e2el": 161}, 1),
        ({"ttft": 1}, 0),
        ({"itl": 51}, 3),
        ({"itl": 41}, 2),
    ],
)
def test_goodput_counts_answers_that_are_within_every_limit(slos, per_second) -> None:
    assert Run((*GOOD, *FAILED), 1.0, limits(slos)).figures()["request_goodput"] == per_second


def test_an_answer_that_was_given_up_is_neither_complete_nor_failed() -> None:
    hung_up = Sample(9, 1, AnswerStream(0.0, pieces=["x"], piece_s=[0.05]), gave_up=True)
    figures = Run((*GOOD, hung_up), 1.0, limits({"ttft": 1000})).figures()
    assert (figures["completed"], figures["failed"], figures["gave_up"]) == (3, 0, 1)
    assert figures["mean_ttft_ms"] == pytest.approx((100 + 300 + 200 + 50) / 4), "its first token came"
    assert figures["mean_e2el_ms"] == pytest.approx(710 / 3), "it has no end"
    assert (figures["request_throughput"], figures["request_goodput"]) == (3, 3)
    assert "3 of 4 completed" in report.table("t", figures, ())


def test_turns_are_distinguished() -> None:
    samples = [
        Sample(conversation, turn, answer(0.0, ttft, end_s=ttft, prompt=prompt, cached=cached))
        for conversation in range(2)
        for turn, ttft, prompt, cached in ((1, 0.4, 100, 0), (2, 0.1, 150, 96))
    ]
    first, second = Run(samples, 1.0).figures()["turns"]
    assert (first["mean_input_tokens"], first["mean_cached_tokens"], first["median_ttft_ms"]) == (100, 0, 400)
    assert second["completed"] == 2
    assert (second["mean_input_tokens"], second["mean_cached_tokens"]) == (150, 96)
    assert "25%" in report.table("t", Run(samples, 1.0).figures(), ())


def test_zero_answers_are_reported() -> None:
    figures = Run(FAILED, 0.0).figures()
    assert (figures["completed"], figures["request_throughput"], figures["p99_ttft_ms"]) == (0, None, None)
    text = report.table("none", figures, limits({"ttft": 5.0}))
    assert "0 of 3 completed" in text
    assert "failed: 2 × HTTP 429: message 0" in text


def test_the_json_bounds_its_samples_and_counts_omitted_ones(monkeypatch) -> None:
    whole = report.as_json(Run((*GOOD, *FAILED), 4.0))
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    assert (len(whole["samples"]), whole["num_samples_left_out"]) == (6, 0)
    assert whole["samples"][0]["itls_ms"] == [20.0, 40.0]
    assert whole["samples"][1]["sent_s"] == 1.0
    assert whole["samples"][3]["error"] == "HTTP 429"
    monkeypatch.setattr(report, "MAX_GAPS", 4)
    cut = report.as_json(Run((*GOOD, *FAILED), 4.0))
    assert (len(cut["samples"]), cut["num_samples_left_out"], cut["completed"]) == (1, 5, 3)


def test_arrivals_are_a_poisson_process_of_their_seed() -> None:
    def first(count: int, *args: float) -> list[float]:
        return list(itertools.islice(arrival_times(*args), count))  # type: ignore[arg-type]

    times = first(20_000, 8.0, 1.0, 1)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    # Exponential distribution: the deviation equals the mean, and 1/e of the gaps are longer than it.
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert (gaps > 1 / 8).mean() == pytest.approx(math.exp(-1), abs=0.015)
    assert first(50, 8.0, 1.0, 1) == times[:50]
    assert first(50, 8.0, 1.0, 2) != times[:50]
    assert statistics.stdev(np.diff(first(2000, 8.0, 0.25, 1))) == pytest.approx(2 / 8, rel=0.2)
    assert first(4, 8.0, math.inf, 1) == [0, 0.125, 0.25, 0.375]


def test_a_fixed_number_of_arrivals_is_spread_as_a_poisson_process_spreads_them() -> None:
    times = arrivals_within(8.0, 2500.0, 1)
    gaps = np.diff(times)
    assert len(times) == 20_000
    assert 0 < times[0] < times[-1] < 2500
    assert (gaps > 1 / 8).mean() == pytest.approx(math.exp(-1), abs=0.015)
    assert [len(arrivals_within(16.0, 20.0, seed)) for seed in range(3)] == [320] * 3
    assert arrivals_within(16.0, 20.0, 1) != arrivals_within(16.0, 20.0, 2)
    assert len(arrivals_within(0.01, 1.0, 0)) == 1


@pytest.mark.parametrize(
    "host",
    [
        "http://127.0.0.1:10002",
        "http://127.8.9.1",
        "http://localhost:1/",
        "http://[::1]:80",
        "https://LOCALHOST",
    ],
)
def test_this_machine_may_be_loaded(host: str) -> None:
    assert check_url(host, flag="--host", allow_remote=False) == host.rstrip("/")
    assert check_url(host.rstrip("/") + "/v1/", flag="--host", allow_remote=False) == host.rstrip("/")


@pytest.mark.parametrize(
    "host",
    [
        "http://example.com",
        "http://10.0.0.1:10002",
        "http://0.0.0.0:10002",
        "http://127.0.0.1.example.com",
        "http://localhost@example.com",
        "http://128.0.0.1",
    ],
)
def test_other_machines_only_when_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-remote-host"):
        check_url(host, flag="--host", allow_remote=False)
    assert check_url(host, flag="--host", allow_remote=True) == host


@pytest.mark.parametrize(
    "host",
    ["", "127.0.0.1:10002", "ftp://127.0.0.1", "file:///etc/passwd", "http://", "http://[::1", "http://a:b"],
)
def test_what_is_no_address_is_refused_always(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host .* is not an address"):
        check_url(host, flag="--host", allow_remote=True)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).random(37).tolist()
    for percent in (0, 50, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None
