"""Objectives: their form, their verdicts and the search for the highest rate that holds them."""

from __future__ import annotations

import asyncio

import pytest
from twofold.api.errors import ConfigError
from twofold.tools.loadgen.answer_stream import AnswerStream
from twofold.tools.loadgen.capacity import Capacity, Search, highest_rate
from twofold.tools.loadgen.metrics import Run, Sample
from twofold.tools.loadgen.report import objectives, stage_table
from twofold.tools.loadgen.slo import Slo, parse_slos


def sample(ttft_ms: float, *gaps_ms: float, stage: str = "", name: str = "") -> Sample:
    moments = [ttft_ms / 1e3]
    for gap_ms in gaps_ms:
        moments.append(moments[-1] + gap_ms / 1e3)
    answer = AnswerStream(0.0, pieces=["x"] * len(moments), piece_s=moments, end_s=moments[-1])
    took_ms = 1e3 * moments[-1]
    return Sample(0, 1, answer, stage=stage, name=name, finished_s=100.0, took_ms=took_ms)


def test_the_form_of_objectives() -> None:
    assert parse_slos("ttft_p95_ms=500, itl_p99.9_ms=50.5,e2el_p100_ms=9000") == (
        Slo("ttft", 95, 500),
        Slo("itl", 99.9, 50.5),
        Slo("e2el", 100, 9000),
    )
    assert parse_slos("") == ()
    assert [str(slo) for slo in parse_slos("ttft_p95_ms=500,e2el_p100_ms=9000")] == [
        "ttft p95 ≤ 500 ms",
        "e2el ≤ 9000 ms",
    ]


@pytest.mark.parametrize(
    "text", ["ttft=500", "ttft_p95=500", "ttft_p101_ms=5", "speed_p95_ms=5", "ttft_p95_ms=-1", "a,b", ","]
)
def test_another_form_is_refused_and_the_right_one_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="METRIC_pPERCENT_ms=LIMIT is expected"):
        parse_slos(text)


def test_an_objective_is_checked_over_all_answers_and_goodput_answer_by_answer() -> None:
    # TTFT 100 … 2000 in steps of 100: p95 by linear interpolation is 1905.
    samples = [sample(100.0 * number) for number in range(1, 21)]
    failed = Sample(1, 1, AnswerStream(0.0), error_kind="HTTP 503", error="busy")
    (loose, tight) = parse_slos("ttft_p95_ms=1906,ttft_p95_ms=1904")
    assert (loose.check([*samples, failed]).met, tight.check([*samples, failed]).met) == (True, False)
    assert loose.check(samples).value_ms == pytest.approx(1905)
    assert Run([*samples, failed], 1.0, (loose,)).figures()["request_goodput"] == 19
    assert not loose.check([failed]).met, "without data an objective is not met"
    text = objectives([loose.check(samples), tight.check(samples), loose.check([])])
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["met", "missed", "missed"]


def test_inter_token_times_of_one_answer_meet_a_limit_by_the_same_percentile() -> None:
    # The median of gaps 10, 20, 30, 40, 50 is 30.
    answer = sample(5.0, 10, 20, 30, 40, 50)
    assert answer.meets(parse_slos("itl_p50_ms=30.1"))
    assert not answer.meets(parse_slos("itl_p50_ms=29.9"))
    assert sample(5.0).meets(parse_slos("itl_p50_ms=1")), "one token has no gap"


def test_an_objective_is_written_as_it_is_read() -> None:
    given = "ttft_p95_ms=500,itl_p99.5_ms=50.5,e2el_p100_ms=60000"
    assert ",".join(each.option for each in parse_slos(given)) == given


def test_stages_and_kinds_have_rows_of_their_own() -> None:
    samples = [
        sample(100, 100, stage="ramp", name="chat"),
        sample(300, 100, stage="ramp", name="chat"),
        sample(50, 50, stage="hold", name="agent"),
        Sample(1, 1, AnswerStream(0.0), error_kind="timeout", error="x", stage="hold", name="agent"),
    ]
    head, *rows = (line.split() for line in stage_table(Run(samples, 1.0)).splitlines())
    assert head[:3] == ["stage", "user", "requests"]
    # Two answers of two tokens within 0.4 s: 10 tokens/s. E2EL 200 and 400: p95 390.
    assert rows[0] == ["ramp", "chat", "2", "0", "0", "200.0", "290.0", "100.0", "390.0", "10.0"]
    assert rows[1][:6] == ["hold", "agent", "2", "0", "1", "50.0"]


class Server:
    """Holds every rate up to its capacity; `noise` lists repetitions that come out wrong."""

    def __init__(self, capacity: float, *noise: int) -> None:
        self.capacity, self.noise = capacity, noise
        self.requested: list[tuple[float, int]] = []

    async def measure(self, rate: float, repetition: int) -> bool:
        self.requested.append((rate, repetition))
        return (rate <= self.capacity) != (repetition in self.noise)

    def search(self, **limits: float) -> Capacity:
        given = {"low": 0.5, "high": 100.0} | limits
        return asyncio.run(highest_rate(self.measure, Search(**given)))  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [0.5, 0.77, 3.0, 11.9, 64.0])
@pytest.mark.parametrize("noise", [(), (1,)])
def test_the_search_ends_within_its_tolerance_despite_an_outlier(
    capacity: float, noise: tuple[int, ...]
) -> None:
    found = Server(capacity, *noise).search()
    assert found.complete
    assert found.held is not None
    assert found.missed is not None
    assert found.held <= capacity < found.missed <= found.held * 1.05


def test_the_search_is_bounded_and_reports_what_it_did_not_find() -> None:
    slow = Server(0.1).search()
    assert (slow.held, slow.missed, slow.num_runs) == (None, 0.5, 2)
    fast = Server(1e6).search()
    assert (fast.held, fast.missed) == (100.0, None)
    server = Server(11.9)
    cut = server.search(max_runs=9)
    assert (cut.complete, len(server.requested)) == (False, cut.num_runs)
    assert cut.num_runs <= 9
    assert cut.held == 4.0
    one = Server(11.9)
    assert (
        one.search(repeats=1, tolerance=0.5).num_runs
        == len(one.requested)
        == len({rate for rate, _ in one.requested})
    )
