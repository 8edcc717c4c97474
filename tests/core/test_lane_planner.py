"""Plans and layer times on machines of one device and of several, against brute force and a clock in small steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold import _core
from twofold import _testing as testing

from tests.core.random_machines import random_cost, random_figures
from tests.engine.fixed_cost import fixed_cost


class Case:
    """A random layer: experts with residency, links with work of their own, and staging room."""

    def __init__(self, seed: int, most: int) -> None:
        rng = random.Random(seed)
        self.num_devices = rng.choice([1, 2, 2, 3])
        self.cost = random_cost(rng, self.num_devices)
        self.is_decode = rng.random() < 0.5
        num_experts = rng.randint(1, most - (self.num_devices == 3))
        self.tokens = [
            1 if self.is_decode else min(2000, max(1, int(rng.paretovariate(0.7))))
            for _ in range(num_experts)
        ]
        self.resident, self.barred = [0] * num_experts, [0] * num_experts
        for i, d in itertools.product(range(num_experts), range(self.num_devices)):
            draw = rng.random()
            self.resident[i] |= (draw < 0.25) << d
            self.barred[i] |= (0.25 <= draw < 0.3) << d
        self.states = []
        for _ in range(self.num_devices):
            backlog = rng.choice([0.0, rng.uniform(0, 2000)])
            queued = backlog + rng.choice([0.0, rng.uniform(0, 1000)])
            self.states.append((backlog, queued, rng.choice([-1, -1, rng.randint(0, 3)])))
        # One token's experts may be deferred, and the CPU may still run those of the layer before.
        defers = self.is_decode and rng.random() < 0.4
        self.deferrable = [defers and rng.random() < 0.4 for _ in range(num_experts)]
        self.cpu_backlog = rng.choice([0.0, rng.uniform(0, 1000)]) if defers else 0.0
        self.gap = rng.uniform(0, 500) if defers else 0.0

    def plan(self, exact_up_to: int = 12) -> testing.LanePlan:
        loads = [
            testing.ExpertLoad(i, self.tokens[i], self.resident[i], self.barred[i], self.deferrable[i])
            for i in range(len(self.tokens))
        ]
        return testing.LanePlanner(self.cost, exact_up_to).plan(
            loads, self.states, not self.is_decode, self.cpu_backlog, self.gap
        )

    def must_run_on_cpu(self, expert: int) -> bool:
        return self.resident[expert] == 0 and self.barred[expert] == 2**self.num_devices - 1

    def is_resident(self, expert: int, device: int) -> bool:
        return bool(self.resident[expert] >> device & 1)

    def time(self, lanes: list[int], streamed: bool) -> float | None:
        """Layer time with each expert in its lane (the last one is the CPU), with what exceeds the gap after it; None:
        not allowed."""
        hits = [[] for _ in range(self.num_devices)]
        fetched = [[] for _ in range(self.num_devices)]
        cpu, later = [], []
        for expert in sorted(range(len(lanes)), key=lambda e: -self.tokens[e]):
            lane, load = lanes[expert], self.tokens[expert]
            if lane == self.num_devices:
                if self.resident[expert]:
                    return None  # a hit runs on a device that holds it
                if streamed and not self.must_run_on_cpu(expert):
                    return None
                (later if self.deferrable[expert] else cpu).append(load)
            elif self.is_resident(expert, lane):
                hits[lane].append(load)
            elif self.barred[expert] >> lane & 1:
                return None
            else:
                fetched[lane].append(load)
        for (_, _, most), experts in zip(self.states, fetched, strict=True):
            if 0 <= most < len(experts):
                return None
        backlog, queued, _ = zip(*self.states, strict=True)
        times = self.cost.machine_layer(
            hits, fetched, cpu, backlog, queued, streamed, later, self.cpu_backlog
        )
        return times.layer_us + max(0.0, times.cpu_end_us - times.layer_us - self.gap)

    def brute_force(self) -> float:
        times = []
        may_stream = not self.is_decode and sum(r == 0 for r in self.resident) > 1
        for lanes in itertools.product(range(self.num_devices + 1), repeat=len(self.tokens)):
            times += [self.time(lanes, False), self.time(lanes, True) if may_stream else None]
        return min(time for time in times if time is not None)

    def lanes_of(self, plan: testing.LanePlan) -> list[int]:
        """Lane of each expert; every expert must be in exactly one, and hits only where they are resident."""
        lanes = dict.fromkeys(plan.cpu, self.num_devices)
        for device, share in enumerate(plan.devices):
            assert all(self.is_resident(expert, device) for expert in share.hits)
            assert not any(self.is_resident(expert, device) for expert in share.fetch)
            assert not lanes.keys() & {*share.hits, *share.fetch}
            lanes |= dict.fromkeys([*share.hits, *share.fetch], device)
        return [lanes[expert] for expert in range(len(self.tokens))]


def check_against_brute_force(seeds: range, most: int) -> None:
    for seed in seeds:
        case = Case(seed, most)
        plan = case.plan()
        # The time that the plan promises is the model's for its assignment.
        promised = plan.times.layer_us + max(0.0, plan.times.cpu_end_us - plan.times.layer_us - case.gap)
        assert case.time(case.lanes_of(plan), plan.streamed) == pytest.approx(promised, rel=1e-9)
        assert promised <= 1.02 * case.brute_force(), f"seed {seed}"


def test_plans_are_within_two_percent_of_brute_force() -> None:
    check_against_brute_force(range(150), most=5)


@pytest.mark.slow
def test_plans_are_within_two_percent_of_brute_force_in_a_larger_sweep() -> None:
    check_against_brute_force(range(1000, 2500), most=6)


def test_wide_layers_are_planned_nearly_as_well_without_the_exact_search() -> None:
    cases = [Case(seed, 5) for seed in range(150)]
    cases = [case for case in cases if not any(case.deferrable)]
    within = sum(case.plan(exact_up_to=0).times.layer_us <= 1.02 * case.brute_force() for case in cases)
    assert within >= 0.98 * len(cases)


def test_a_wide_layer_is_never_slower_than_on_one_device_alone() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        figures = [random_figures(rng), random_figures(rng)]
        sizes = 10 ** rng.uniform(5.5, 8), 10 ** rng.uniform(6, 9)
        first, second = (_core.MachineProfile.from_fields("d", each) for each in figures)
        tokens = [min(2000, int(rng.paretovariate(0.7))) for _ in range(40)]
        resident = [rng.random() < 0.3 for _ in tokens]
        loads = [testing.ExpertLoad(i, n, int(resident[i])) for i, n in enumerate(tokens)]
        alone, both = (
            testing.LanePlanner(testing.CostModel(machine, *sizes)).plan(
                loads, [(0.0, 0.0, -1)] * count, True
            )
            for count, machine in enumerate([first, first.with_devices([second])], 1)
        )
        assert both.times.layer_us <= alone.times.layer_us * (1 + 1e-9)


def test_of_equal_experts_the_first_are_fetched() -> None:
    cost = fixed_cost()
    plan = testing.LanePlanner(cost).plan(
        [testing.ExpertLoad(expert, 1) for expert in (7, 3, 5, 1, 6, 2)], [(0.0, 0.0, -1)], False
    )
    (device,) = plan.devices
    assert device.fetch == [7, 3, 5, 1, 6, 2][: len(device.fetch)]
    assert device.fetch
    assert len(device.fetch) == testing.SplitMemo(cost, 6).split(0, 6, 0, 0.0)


def test_two_links_slow_the_cpu_for_as_long_as_each_copies() -> None:
    """The CPU's time in closed form, against its progress in steps of a tenth of a microsecond."""
    rng = random.Random(3)
    for _ in range(40):
        figures = [random_figures(rng) for _ in range(3)]
        first, *others = (_core.MachineProfile.from_fields("d", each) for each in figures)
        cost = testing.CostModel(first.with_devices(others), 1e6, 1e6)
        copying = [rng.choice([0.0, rng.uniform(0, 400)]) for _ in figures]
        work = sum(cost.cpu_expert_us(1) for _ in range(4))
        found = cost.machine_layer([[]] * 3, [[]] * 3, [1] * 4, [0.0] * 3, copying)
        step, now, done = 0.1, 0.0, 0.0
        while done < work:
            chi = sum(f["contention"] for f, us in zip(figures, copying, strict=True) if us > now)
            done += step / (1 + chi)
            now += step
        assert found.cpu_us == pytest.approx(figures[0]["handshake_us"] + now, abs=1.0)


def test_a_device_away_from_home_pays_for_the_exchange_of_activations() -> None:
    rng = random.Random(4)
    figures = [random_figures(rng), random_figures(rng)]
    first, second = (_core.MachineProfile.from_fields("d", each) for each in figures)
    cost = testing.CostModel(first.with_devices([second]), 1e6, 1e6)
    second_alone = testing.CostModel(second, 1e6, 1e6)
    alone = figures[1]["gpu_launch_us"] + second_alone.gpu_expert_us(1) + second_alone.gpu_expert_us(3)
    found = cost.machine_layer([[], [1, 3]], [[], []], [], [0.0, 0.0], [0.0, 0.0])
    exchange = figures[0]["handshake_us"] + figures[1]["handshake_us"]
    assert found.gpu_us == pytest.approx(alone + exchange)
    assert found.layer_us == pytest.approx(alone + exchange + figures[0]["join_us"])


def test_work_for_another_number_of_devices_is_refused() -> None:
    cost = random_cost(random.Random(5), 2)
    with pytest.raises(ValueError, match="work of 3 devices given, the machine's 2 expected"):
        cost.machine_layer([[]] * 3, [[]] * 3, [1], [0.0] * 3, [0.0] * 3)
    with pytest.raises(ValueError, match="1 device states given, 2 expected"):
        testing.LanePlanner(cost).plan([testing.ExpertLoad(0, 1)], [(0.0, 0.0, -1)], False)
    with pytest.raises(ValueError, match="expert 4 has 0 tokens"):
        testing.LanePlanner(cost).plan([testing.ExpertLoad(4, 0)], [(0.0, 0.0, -1)] * 2, False)


@st.composite
def costs(draw: st.DrawFn) -> testing.CostModel:
    return random_cost(random.Random(draw(st.integers(0, 2**32))), 1)


@settings(max_examples=100, deadline=None)
@given(cost=costs(), routed=st.integers(1, 10), data=st.data())
def test_a_kept_split_is_the_best_of_all(cost: testing.CostModel, routed: int, data: st.DataObject) -> None:
    memo = testing.SplitMemo(cost, routed)
    misses = data.draw(st.integers(0, routed))
    hits = data.draw(st.integers(0, routed - misses))
    in_flight = data.draw(st.integers(0, routed - misses - hits))
    backlog = data.draw(st.integers(0, memo.num_buckets - 1)) * memo.bucket_us
    times = [
        cost.layer([1] * hits, [1] * f, [1] * (misses - f + in_flight), backlog)[0].layer_us
        for f in range(misses + 1)
    ]
    for _ in range(2):  # computed, then kept
        split = memo.split(hits, misses, in_flight, backlog)
        assert times[split] == pytest.approx(min(times), rel=1e-12)
        # Ties go to fewer fetches.
        assert all(t > times[split] * (1 - 1e-12) for t in times[:split])


def test_splits_outside_the_memo() -> None:
    memo = testing.SplitMemo(fixed_cost(), 4)
    assert memo.split(0, 4, 0, 1e9) == 0
    for given_counts in [(0, 5, 0), (-1, 2, 0), (3, -1, 0), (2, 2, 1)]:
        with pytest.raises(ValueError, match="hits = "):
            memo.split(*given_counts, 0.0)
    with pytest.raises(ValueError, match="max_routed = 0"):
        testing.SplitMemo(fixed_cost(), 0)


@settings(max_examples=60, deadline=None)
@given(
    cost=costs(),
    tokens=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    backlog=st.floats(0, 3000),
)
def test_descending_load_is_the_best_upload_order(
    cost: testing.CostModel, tokens: Sequence[int], backlog: float
) -> None:
    best = min(cost.layer([], list(p), [], backlog)[0].layer_us for p in itertools.permutations(tokens))
    assert cost.layer([], sorted(tokens, reverse=True), [], backlog)[0].layer_us == pytest.approx(best)


def test_a_whole_layer_is_streamed_when_every_expert_carries_a_heavy_load() -> None:
    loads = [testing.ExpertLoad(expert, 400) for expert in range(16)]
    plan = testing.LanePlanner(fixed_cost()).plan(loads, [(0.0, 0.0, -1)], True)
    assert plan.streamed
    assert not plan.cpu


def test_a_streamed_layer_leaves_experts_in_flight_to_the_cpu() -> None:
    loads = [testing.ExpertLoad(expert, 400, barred=int(expert == 3)) for expert in range(16)]
    plan = testing.LanePlanner(fixed_cost()).plan(loads, [(0.0, 0.0, -1)], True)
    assert plan.streamed
    assert plan.cpu == [3]
