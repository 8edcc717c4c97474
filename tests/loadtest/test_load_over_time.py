"""Stages, arrivals and lengths against values worked out by hand or the distribution they come from."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from twofold.tools.loadgen.capacity import Search
from twofold.tools.loadgen.lengths import CHAT_INPUT, CHAT_OUTPUT, Lengths
from twofold.tools.loadgen.loadtest_plan import CapacityPlan, LoadTestPlan
from twofold.tools.loadgen.shapes import SHAPES, poisson_arrivals, stage_at, stages, user_count
from twofold.tools.loadgen.slo import parse_slos


@pytest.mark.parametrize(
    ("shape", "users"),
    [
        ("constant", [40, 40, 40, 40, 40]),
        # Up in 80 s, then flat.
        ("ramp", [1, 10, 20, 30, 40]),
        ("step", [10, 10, 20, 30, 40]),
        ("spike", [8, 8, 40, 8, 8]),
        ("soak", [40, 40, 40, 40, 40]),
    ],
)
def test_users_over_time(shape: str, users: list[int]) -> None:
    plan = stages(shape, 40, 100)
    assert [user_count(plan, at_s) for at_s in (0, 20, 40, 60, 90)] == users
    assert user_count(plan, 100) is None
    assert stage_at(plan, -1) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_follow_each_other_without_a_gap_and_have_names_of_their_own(shape: str) -> None:
    plan = stages(shape, 7, 60)
    assert plan[0].begin_s == 0
    assert plan[-1].end_s == pytest.approx(60)
    assert all(a.end_s == b.begin_s for a, b in itertools.pairwise(plan))
    assert len({stage.name for stage in plan}) == len(plan)
    assert max(max(stage.begin_level, stage.end_level) for stage in plan) == 7


def test_the_open_loop_follows_the_rate_of_its_stages() -> None:
    arrivals = list(poisson_arrivals(stages("spike", 50, 1000), seed=3))
    assert arrivals == sorted(arrivals) == list(poisson_arrivals(stages("spike", 50, 1000), seed=3))
    counts = np.histogram(arrivals, bins=[0, 400, 600, 1000])[0]
    # Expected 10/s, 50/s, 10/s; five standard deviations of a Poisson count.
    for count, expected in zip(counts, (4000, 10_000, 4000), strict=True):
        assert abs(count - expected) < 5 * math.sqrt(expected)
    ramp = list(poisson_arrivals(stages("ramp", 50, 1000), seed=3))
    halves = np.histogram(ramp, bins=[0, 400, 800])[0]
    # The area below a ramp: the second half has three times the first.
    assert halves[1] / halves[0] == pytest.approx(3, rel=0.1)
    gaps = np.diff(list(poisson_arrivals(stages("constant", 50, 400), seed=1)))
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


@pytest.mark.parametrize("lengths", [CHAT_INPUT, CHAT_OUTPUT])
def test_lengths_have_their_median_and_their_tail(lengths: Lengths) -> None:
    draw = random.Random(1)
    drawn = np.array([lengths.draw(draw) for _ in range(20_000)])
    assert np.median(drawn) == pytest.approx(lengths.median, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(lengths.log_std, rel=0.05)
    cut = lengths.at_most(100)
    assert max(cut.draw(draw) for _ in range(2000)) == 100
    assert lengths.at_most(2).draw(draw) <= 2


def test_plans_survive_the_command_line() -> None:
    slos = parse_slos("ttft_p95_ms=500,itl_p95_ms=50")
    plan = LoadTestPlan(mix={"chat": 3, "agent": 1}, rate=2.5, shape="spike", slos=slos)
    assert LoadTestPlan.from_json(plan.to_json()) == plan
    assert (plan.arrival_stages[1].begin_level, plan.user_stages[1].begin_level) == (2.5, 10)
    capacity = CapacityPlan(slos, Search(1.0, 9.0))
    assert CapacityPlan.from_json(capacity.to_json()) == capacity
