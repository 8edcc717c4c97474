"""The steps of a layer's scheduler on machines of one to three devices: what it placed, priced and moved agrees."""

from __future__ import annotations

import random

import numpy as np
import pytest
from twofold import _core
from twofold import _testing as testing

from tests.core.random_machines import random_cost

LAYERS, EXPERTS, TOP_K = 2, 12, 3


class Machine:
    """A scheduler with its links; a share of the slots is filled at the start."""

    def __init__(self, seed: int, num_devices: int, **rules: object) -> None:
        rng = random.Random(seed)
        self.rng, self.num_devices = rng, num_devices
        self.cost = random_cost(rng, num_devices)
        self.slots = [rng.randint(0, 9) for _ in range(num_devices)]
        config = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, self.slots, **rules)
        self.upload_us = [self.cost.upload_us_of(device) for device in range(num_devices)]
        links = [_core.Timeline(us) for us in self.upload_us]
        self.scheduler = testing.LayerScheduler(self.cost, config, links)
        for expert in rng.sample(range(EXPERTS), sum(self.slots) // LAYERS):
            self.scheduler.preload(0, expert)

    def routing(self, num_tokens: int) -> np.ndarray:
        return np.array([self.rng.sample(range(EXPERTS), TOP_K) for _ in range(num_tokens)], dtype=np.int32)

    def lanes(self, decision: testing.LayerDecision) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Tokens of the hits and of the fetched experts of each device, and of the CPU's experts."""
        hits, fetched = ([[] for _ in range(self.num_devices)] for _ in range(2))
        tokens = {e.expert: e.tokens for e in decision.experts}
        for move in decision.moves:
            if move.reason == _core.UploadReason.DEMAND and move.layer == 0:
                fetched[move.device].append(tokens[move.expert])
        for e in decision.experts:
            if e.where == _core.Placement.HIT:
                hits[e.device].append(e.tokens)
        cpu = [e.tokens for e in decision.experts if e.where == _core.Placement.CPU]
        return hits, fetched, cpu


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_a_layer_costs_what_its_placement_costs(num_devices: int, num_tokens: int) -> None:
    for seed in range(25):
        machine = Machine(seed, num_devices)
        machine.scheduler.begin_step()
        ids = machine.routing(num_tokens)
        decision = machine.scheduler.decide(0, ids)
        active, loads = np.unique(ids, return_counts=True)
        assert [(e.expert, e.tokens) for e in decision.experts] == list(zip(active, loads, strict=True))
        hits, fetched, cpu = machine.lanes(decision)
        assert sum(map(len, [*hits, *fetched, cpu])) == len(active)
        idle = [0.0] * num_devices
        times = [
            machine.cost.machine_layer(hits, fetched, cpu, idle, idle, streamed).layer_us
            for streamed in (False, True)
        ]
        assert any(decision.times.layer_us == pytest.approx(us, rel=1e-12) for us in times), seed


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_fetched_experts_have_slots_of_their_own(num_devices: int) -> None:
    for seed in range(40):
        machine = Machine(seed, num_devices)
        for _ in range(3):
            machine.scheduler.begin_step()
            decision = machine.scheduler.decide(0, machine.routing(8))
            used = [(e.device, e.slot) for e in decision.experts if e.where != _core.Placement.CPU]
            assert len(set(used)) == len(used), seed
            for e in decision.experts:
                if e.where == _core.Placement.HIT:
                    assert machine.scheduler.state(0, e.expert, e.device) == testing.ExpertState.RESIDENT
            machine.scheduler.advance(1e5)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("rule", ["none", "min-sum", "two-ended", "link-share", "all"])
def test_another_engines_rule_fetches_to_the_layers_home(num_devices: int, rule: str) -> None:
    for seed in range(10):
        machine = Machine(seed, num_devices, fetch_rule=rule, background_uploads=False)
        machine.scheduler.begin_step()
        decision = machine.scheduler.decide(0, machine.routing(2))
        for move in decision.moves:
            assert move.device == 0
        held = [e.where == _core.Placement.HIT for e in decision.experts]
        fetched = [e.where == _core.Placement.FETCHED for e in decision.experts]
        assert rule != "none" or not any(fetched)
        assert rule != "all" or all(a or b for a, b in zip(held, fetched, strict=True))


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_predicted_expert_is_prefetched_by_one_device_in_time(num_devices: int) -> None:
    arrived = 0
    for seed in range(20):
        machine = Machine(seed, num_devices, prefetch=True)
        for step in range(30):
            machine.scheduler.begin_step()
            ids = machine.routing(1)
            for layer in range(LAYERS):
                if layer + 1 < LAYERS:
                    scores = np.zeros((1, EXPERTS), np.float32)
                    scores[0, ids[0]] = 5
                    machine.scheduler.predict(layer + 1, scores)
                decision = machine.scheduler.decide(layer, ids)
                for expert in decision.arrived:
                    where = [
                        machine.scheduler.state(layer, expert, d) == testing.ExpertState.RESIDENT
                        for d in range(num_devices)
                    ]
                    assert sum(where) <= 1, (seed, step)  # what landed may have lost its slot again
                    arrived += sum(where)
                machine.scheduler.advance(2 * max(machine.upload_us))
        counts = machine.scheduler.counts()["prefetch"]
        assert counts["used"] + counts["late"] + counts["wasted"] <= counts["issued"]
    assert arrived > 20


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            {"cache_prior": 0.95},
            "cache_prior = 0.95.* given, a number of at least 0 and at most 0.9 expected",
        ),
        ({"num_staging": -2}, "num_staging = -2 given, a number of at least -1 expected"),
    ],
)
def test_an_option_out_of_its_range_is_refused(option: dict[str, float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Machine(0, 1, **option)


def test_every_option_is_an_argument_with_its_default() -> None:
    options = _core.scheduler_options()
    given = {name: option["default"] for name, option in options.items()}
    assert _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, 4, **given) is not None
