"""The simulator and the emulated accelerator play the same routing: their layer times must be the same numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from twofold import _core
from twofold.blocks import ops
from twofold.experts.profiles import load_profile

from tests.tiny_models.writing import weight_matrix

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 3, 12, 4, 16, 16
LENGTHS = [14, 9, 11]


def routing() -> np.ndarray:
    rng = np.random.default_rng(4)
    popularity = rng.normal(size=(LAYERS, EXPERTS))
    noise = rng.gumbel(size=(sum(LENGTHS), LAYERS, EXPERTS))
    return np.argsort(-(1.5 * popularity + noise), axis=2)[:, :, :TOP_K].astype(np.int32)


def cost_model(store, num_devices: int = 1) -> _core.CostModel:
    """A slow, wide machine on which these small experts still give every kind of plan."""
    figures = load_profile("rtx4090-pcie4").cost_figures | {
        "cpu_bandwidth_gbps": 0.05,
        "link_bandwidth_gbps": 0.04,
        "vram_bandwidth_gbps": 1.0,
        "link_latency_us": 1.0,
    }
    machine = _core.MachineProfile.from_fields("slow", figures)
    if num_devices > 1:
        slower = figures | {"link_bandwidth_gbps": 0.02, "vram_bandwidth_gbps": 0.3}
        machine = machine.with_devices(
            [_core.MachineProfile.from_fields("slower", slower)] * (num_devices - 1)
        )
    return _core.CostModel(machine, store.expert_bytes, store.flops_per_token)


def schedule(batch: int) -> list[list[tuple[int, int, int]]]:
    """Steps of (sequence, position, row), lanes refilled in order."""
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    waiting, lanes, steps = list(range(len(LENGTHS))), [None] * batch, []
    while True:
        step = []
        for i in range(batch):
            if lanes[i] is None and waiting:
                lanes[i] = (waiting.pop(0), 0)
            if lanes[i] is None:
                continue
            sequence, position = lanes[i]
            step.append((sequence, position, int(starts[sequence]) + position))
            done = position + 1 == LENGTHS[sequence]
            lanes[i] = None if done else (sequence, position + 1)
        if not step:
            return steps
        steps.append(step)


PROMPT = 5


def requests() -> list[list[tuple[int, int, int]]]:
    """Each sequence alone: a prompt in one step, then token by token."""
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    steps = []
    for sequence, length in enumerate(LENGTHS):
        bounds = [0, *range(PROMPT, length + 1)]
        for begin, end in itertools.pairwise(bounds):
            steps.append([(sequence, at, int(starts[sequence]) + at) for at in range(begin, end)])
    return steps


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("policy", ["payback", "lru", "two-in-eight"])
@pytest.mark.parametrize("num_slots", [0, 9, 18])
@pytest.mark.parametrize("num_deferred", [0, 2])
def test_emulated_layer_times_equal_simulated_ones(policy, num_slots, batch, num_deferred):
    config = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, num_slots, policy, num_deferred=num_deferred)
    result, _, simulate = both(config, schedule(batch), batch)
    assert (result.num_hits > 0) == (num_slots > 0)
    assert result.num_cpu > 0
    if num_deferred and num_slots < 18:
        at_once = simulate(_core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, num_slots, policy))
        assert result.total_us < at_once.total_us, "deferral gains nothing"
    assert result.num_fetched > 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("policy", ["payback", "lru", "two-in-eight"])
@pytest.mark.parametrize("slots", [[9, 9], [9, 6, 4], [9, 0]])
def test_so_do_those_of_several_devices(policy, slots, batch):
    config = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, slots, policy)
    result, _, simulate = both(config, schedule(batch), batch, num_devices=len(slots))
    assert min(result.num_hits, result.num_cpu, result.num_fetched, result.num_uploads) > 0
    if slots[1] and policy == "payback":
        none = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, [9, *[0] * len(slots[1:])], policy)
        assert result.total_us < simulate(none).total_us, "more slots gain nothing"


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "rules",
    [
        {"num_deferred": 2},
        {"policy": "belady"},
        *({"fetch_rule": rule} for rule in ("none", "min-sum", "two-ended", "link-share", "all")),
        {"fetch_rule": "two-ended", "always_cache_fetched": True},
    ],
    ids=str,
)
def test_every_rule_works_on_several_devices(rules, batch):
    config = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, [9, 6], **rules)
    offline = rules.get("policy") == "belady"
    result = simulated(config, batch) if offline else both(config, schedule(batch), batch, num_devices=2)[0]
    assert result.num_hits > 0
    assert (result.num_fetched == 0) == (rules.get("fetch_rule") in ("none", "min-sum"))
    if offline:
        assert (
            result.num_hits
            >= simulated(_core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, [9, 6], "lru"), batch).num_hits
        )


def simulated(config, batch):
    store = _core.ExpertStore(EXPERTS, HIDDEN, INNER, [("f32",) * 3] * LAYERS)
    trace = _core.RoutingTrace(routing().astype(np.uint16), None, np.cumsum([0, *LENGTHS]), EXPERTS)
    return _core.simulate(trace, batch, cost_model(store, 2), config, dense_us=[300.0] * (LAYERS + 1))


def test_slots_and_links_for_another_number_of_devices_are_refused():
    store = _core.ExpertStore(EXPERTS, HIDDEN, INNER, [("f32",) * 3] * LAYERS)
    trace = _core.RoutingTrace(routing().astype(np.uint16), None, np.cumsum([0, *LENGTHS]), EXPERTS)

    def simulate(num_devices, slots):
        config = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, slots)
        _core.simulate(trace, 1, cost_model(store, num_devices), config, dense_us=[1.0] * (LAYERS + 1))

    with pytest.raises(ValueError, match="slots for 1 devices and 2 links given, 2 of each expected"):
        simulate(2, 9)
    with pytest.raises(ValueError, match="slots for 2 devices and 1 links given, 1 of each expected"):
        simulate(1, [9, 9])


@pytest.mark.parametrize("slots", [[9], [6, 3]])
def test_prompts_that_replace_experts_do_so_too(slots):
    def config(replace_from, first):
        return _core.SchedulerConfig(
            LAYERS,
            EXPERTS,
            TOP_K,
            slots,
            "static",
            shared_pool=True,
            fixed_placement=True,
            replace_from=replace_from,
            prior_usage=first.ravel().tolist(),
        )

    first = np.zeros((LAYERS, EXPERTS))
    first[:, :3] = 1
    result, counts, _ = both(config(PROMPT, first), requests(), 1, PROMPT, first, len(slots))
    assert (result.num_prompt_tokens, result.num_steps) == (15, 3 + sum(LENGTHS) - 15)
    assert 0 < result.prompt_us < result.total_us
    assert (counts["updated"], counts["unchanged"], counts["too_few_tokens"]) == (3, 0, 0)
    assert result.num_evictions > 0
    result, counts, _ = both(config(PROMPT + 1, first), requests(), 1, PROMPT, first, len(slots))
    assert (result.num_evictions, counts["too_few_tokens"]) == (0, 3)
    assert result.num_hits > 0


def both(config, steps, batch, prompt_tokens=0, placed=None, num_devices=1):
    """(what the simulator says, what came of dynamic update in the emulated run), which are one story, and the
    simulator for another configuration."""
    ids = routing()
    store = _core.ExpertStore(EXPERTS, HIDDEN, INNER, [("f32",) * 3] * LAYERS)
    up = weight_matrix(np.zeros((INNER, HIDDEN), np.float32))
    down = weight_matrix(np.zeros((HIDDEN, INNER), np.float32))
    for layer in range(LAYERS):
        store.put(ops.ThreadPool(1), layer, 0, [(up, up, down)] * EXPERTS)
    cost = cost_model(store, num_devices)

    dense_us = 300.0  # some three of the CPU's experts long
    num_bytes, no_flops = [dense_us * 1e3] * (LAYERS + 1), [0.0] * (LAYERS + 1)
    executor = _core.MoeExecutor.emulated(
        ops.ThreadPool(1),
        store,
        cost=cost,
        config=config,
        dense=_core.DenseCost(bytes=num_bytes, flops_per_token=no_flops),
        preload=False,
    )
    if placed is not None:
        executor.place_experts(placed.astype(np.uint8))
    executor.events_enabled = True
    emulated = []
    for number, step in enumerate(steps):
        positions = [p for _, p, _ in step]
        executor.begin_step(
            number, [s for s, _, _ in step], positions, [p >= prompt_tokens for p in positions]
        )
        rows = [row for _, _, row in step]
        hidden = np.zeros((len(rows), HIDDEN), np.float32)
        for layer in range(LAYERS):
            gate = np.full((len(rows), TOP_K), 0.5, np.float32)
            executor.forward(layer, hidden.copy(), np.ascontiguousarray(ids[rows, layer]), gate, hidden)
        executor.end_step()
        events = executor.drain_events()["token_layer"]
        events = events[np.argsort(events["layer"], kind="stable")]
        emulated += [float(events["layer_us"][events["layer"] == layer][0]) for layer in range(LAYERS)]
    counts = executor.counts()

    stretches = [load_profile("rtx4090-pcie4").cost_figures["gpu_launch_us"] + dense_us] * (LAYERS + 1)
    trace = _core.RoutingTrace(
        ids.astype(np.uint16), np.full(ids.shape, 0.5, np.float32), np.cumsum([0, *LENGTHS]), EXPERTS
    )

    def simulate(config):
        return _core.simulate(
            trace, batch, cost, config, dense_us=stretches, keep_layer_us=True, prompt_tokens=prompt_tokens
        )

    result = simulate(config)
    assert result.layer_us.tolist() == emulated
    assert result.total_us == pytest.approx(executor.virtual_now_us, rel=1e-12)
    assert (result.num_uploads, result.num_evictions) == (counts["uploads"], counts["evictions"])
    return result, executor.scheduler_counts()["dynamic_update"], simulate
