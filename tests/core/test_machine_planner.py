"""Plans and layer times of machines with several devices, against brute force and a clock in small steps."""

from __future__ import annotations

import itertools
import random

import pytest
from twofold import _core
from twofold import _testing as testing

from tests.engine.fixed_cost import fixed_cost


def random_figures(rng: random.Random) -> dict[str, float]:
    return {
        "handshake_us": rng.uniform(0, 60),
        "cpu_bandwidth_gbps": 10 ** rng.uniform(1, 2.6),
        "cpu_gflops": 10 ** rng.uniform(2, 4.3),
        "cpu_expert_overhead_us": rng.uniform(0, 10),
        "gpu_launch_us": rng.uniform(0, 30),
        "vram_bandwidth_gbps": 10 ** rng.uniform(2.3, 3.6),
        "gpu_gflops": 10 ** rng.uniform(3.5, 5.7),
        "link_latency_us": rng.uniform(0, 30),
        "link_bandwidth_gbps": 10 ** rng.uniform(0.5, 2),
        "contention": rng.uniform(0, 0.6),
        "join_us": rng.uniform(0, 10),
    }


def random_cost(rng: random.Random, num_devices: int) -> testing.CostModel:
    first, *others = (
        _core.MachineProfile.from_fields(f"d{d}", random_figures(rng)) for d in range(num_devices)
    )
    return testing.CostModel(first.with_devices(others), 10 ** rng.uniform(5.5, 8), 10 ** rng.uniform(6, 9))


class Case:
    """A random layer: experts with residency, links with work of their own, and staging room."""

    def __init__(self, seed: int, most: int) -> None:
        rng = random.Random(seed)
        self.num_devices = rng.choice([2, 2, 3])
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

    def plan(self, exact_up_to: int = 12) -> testing.MachinePlan:
        loads = [
            testing.MachineLoad(i, self.tokens[i], self.resident[i], self.barred[i])
            for i in range(len(self.tokens))
        ]
        return testing.MachinePlanner(self.cost, exact_up_to).plan(loads, self.states, not self.is_decode)

    def is_resident(self, expert: int, device: int) -> bool:
        return bool(self.resident[expert] >> device & 1)

    def time(self, lanes: list[int], streamed: bool) -> float | None:
        """Layer time with each expert in its lane (the last one is the CPU); None: not allowed."""
        hits = [[] for _ in range(self.num_devices)]
        fetched = [[] for _ in range(self.num_devices)]
        cpu = []
        for expert in sorted(range(len(lanes)), key=lambda e: -self.tokens[e]):
            lane, load = lanes[expert], self.tokens[expert]
            if lane == self.num_devices:
                cpu.append(load)
            elif self.is_resident(expert, lane):
                hits[lane].append(load)
            elif self.barred[expert] >> lane & 1:
                return None
            else:
                fetched[lane].append(load)
        for (_, _, most), experts in zip(self.states, fetched, strict=True):
            if 0 <= most < len(experts):
                return None
        if streamed and cpu:
            return None
        backlog, queued, _ = zip(*self.states, strict=True)
        return self.cost.machine_layer(hits, fetched, cpu, backlog, queued, streamed).layer_us

    def brute_force(self) -> float:
        times = []
        may_stream = not self.is_decode and sum(r == 0 for r in self.resident) > 1
        for lanes in itertools.product(range(self.num_devices + 1), repeat=len(self.tokens)):
            times += [self.time(lanes, False), self.time(lanes, True) if may_stream else None]
        return min(time for time in times if time is not None)

    def lanes_of(self, plan: testing.MachinePlan) -> list[int]:
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
        assert case.time(case.lanes_of(plan), plan.streamed) == pytest.approx(plan.times.layer_us, rel=1e-9)
        assert plan.times.layer_us <= 1.02 * case.brute_force(), f"seed {seed}"


def test_plans_are_within_two_percent_of_brute_force() -> None:
    check_against_brute_force(range(150), most=5)


@pytest.mark.slow
def test_plans_are_within_two_percent_of_brute_force_in_a_larger_sweep() -> None:
    check_against_brute_force(range(1000, 2500), most=6)


def test_wide_layers_are_planned_nearly_as_well_without_the_exact_search() -> None:
    cases = [Case(seed, 5) for seed in range(150)]
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
        loads = [testing.MachineLoad(i, n, int(resident[i])) for i, n in enumerate(tokens)]
        both = testing.MachinePlanner(testing.CostModel(first.with_devices([second]), *sizes)).plan(
            loads, [(0.0, 0.0, -1)] * 2, True
        )
        alone = testing.PrefillPlanner(testing.CostModel(first, *sizes)).plan(
            list(range(40)), tokens, resident
        )
        assert both.times.layer_us <= alone.times.layer_us * (1 + 1e-9)


def test_of_equal_experts_the_first_are_fetched() -> None:
    cost = fixed_cost()
    plan = testing.MachinePlanner(cost).plan(
        [testing.MachineLoad(expert, 1) for expert in (7, 3, 5, 1, 6, 2)], [(0.0, 0.0, -1)], False
    )
    (device,) = plan.devices
    assert device.fetch == [7, 3, 5, 1, 6, 2][: len(device.fetch)]
    assert device.fetch
    assert len(device.fetch) == testing.DecodePlanner(cost, 6).split(0, 6, 0.0)


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


def test_a_further_device_pays_for_the_exchange_of_activations() -> None:
    rng = random.Random(4)
    figures = [random_figures(rng), random_figures(rng)]
    first, second = (_core.MachineProfile.from_fields("d", each) for each in figures)
    cost = testing.CostModel(first.with_devices([second]), 1e6, 1e6)
    alone = testing.CostModel(second, 1e6, 1e6).gpu_us([1, 3])
    found = cost.machine_layer([[], [1, 3]], [[], []], [], [0.0, 0.0], [0.0, 0.0])
    exchange = figures[0]["handshake_us"] + figures[1]["handshake_us"]
    assert found.gpu_us == pytest.approx(alone + exchange)
    assert found.layer_us == pytest.approx(alone + exchange + figures[0]["join_us"])


def test_work_for_another_number_of_devices_is_refused() -> None:
    cost = random_cost(random.Random(5), 2)
    with pytest.raises(ValueError, match="work of 3 devices given, the machine's 2 expected"):
        cost.machine_layer([[]] * 3, [[]] * 3, [1], [0.0] * 3, [0.0] * 3)
    with pytest.raises(ValueError, match="1 device states given, 2 expected"):
        testing.MachinePlanner(cost).plan([testing.MachineLoad(0, 1)], [(0.0, 0.0, -1)], False)
    with pytest.raises(ValueError, match="expert 4 has 0 tokens"):
        testing.MachinePlanner(cost).plan([testing.MachineLoad(4, 0)], [(0.0, 0.0, -1)] * 2, False)
