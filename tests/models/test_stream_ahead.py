"""Uploads for the next layer of a large chunk: when they are begun, what they gain, and that they never cost anything.

All times are simulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold import _core
from twofold.blocks import ops

from tests.tiny_models.writing import weight_matrix

# Round figures: an upload takes 100 us, an expert 30 us on the device, and the CPU is out of the question.
EXPERT_BYTES = 1e5
FIGURES = {
    "handshake_us": 1.0,
    "cpu_bandwidth_gbps": 1e-3,
    "cpu_gflops": 1e6,
    "cpu_expert_overhead_us": 0.0,
    "gpu_launch_us": 2.0,
    "vram_bandwidth_gbps": EXPERT_BYTES / 30e3,
    "gpu_gflops": 1e9,
    "link_latency_us": 0.0,
    "link_bandwidth_gbps": EXPERT_BYTES / 100e3,
    "contention": 0.3,
    "join_us": 5.0,
}


def simulate(ids: np.ndarray, figures: dict[str, float], *, ahead: bool, chunk: int, **options: Any) -> Any:
    """Play ids [tokens, layers, top_k] as one prompt."""
    num_experts, dense_us = options.pop("num_experts"), options.pop("dense_us")
    trace = _core.RoutingTrace(
        ids.astype(np.uint16), None, np.array([0, len(ids)], np.int64), num_experts=num_experts
    )
    machine = _core.MachineProfile.from_fields("round", figures)
    config = _core.SchedulerConfig(
        ids.shape[1],
        num_experts,
        ids.shape[2],
        stream_ahead_from=33 if ahead else 0,
        **{"policy": "static", "background_uploads": False, **options},
    )
    cost = _core.CostModel(machine, EXPERT_BYTES, 1e3)
    return _core.simulate(trace, 1, cost, config, dense_us, prompt_chunk=chunk)


def all_experts(num_tokens: int, num_layers: int, num_experts: int) -> np.ndarray:
    """Top-1 routing that gives every expert as many tokens."""
    return np.broadcast_to(
        (np.arange(num_tokens) % num_experts)[:, None, None], (num_tokens, num_layers, 1)
    ).copy()


BY_HAND: dict[str, Any] = {
    "chunk": 40,
    "slots": 0,
    "num_experts": 4,
    "num_staging": 8,
    "dense_us": [200.0, 200.0, 7.0],
}
"""Two layers of four experts; the numbers below follow from these."""


def test_an_example_worked_by_hand() -> None:
    # Two layers of four experts, none of them in a slot. Before a layer the device is busy for 200 us.
    # Alone, a layer takes 4 * 100 us on the link, then 30 us for the last expert and 5 us to join: 435 us.
    # Ahead: from the end of layer 0's uploads until layer 1 begins the link is free for 35 + 200 us, which is two
    # uploads. The first chunk does not know of the 200 us yet, and layer 0 has no layer before it: so each chunk but
    # the first gains 200 us.
    ids = all_experts(3 * 40, 2, 4)
    alone = simulate(ids, FIGURES, ahead=False, **BY_HAND)
    ahead = simulate(ids, FIGURES, ahead=True, **BY_HAND)
    assert alone.total_us == pytest.approx(3 * (2 * (200 + 435) + 7))
    assert alone.total_us - ahead.total_us == pytest.approx(2 * 200)
    assert ahead.num_uploads == alone.num_uploads == ahead.num_fetched == 3 * 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"chunk": 20}, "the chunk is small"),
        ({"num_staging": 4}, "the layer itself needs all of the staging slots"),
        ({"dense_us": [200.0, 40.0, 7.0]}, "there is no time for an upload"),
        ({"slots": 8, "prior_usage": [1.0] * 8}, "everything is resident"),
        ({"fetch_rule": "two-ended"}, "a peer has its own rule"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_expert_is_streamed_ahead_where(change: dict[str, Any], why: str) -> None:
    ids = all_experts(3 * 40, 2, 4)
    alone, ahead = (simulate(ids, FIGURES, ahead=on, **BY_HAND | change) for on in (False, True))
    assert (ahead.total_us, ahead.num_uploads) == (alone.total_us, alone.num_uploads), why


machines = st.fixed_dictionaries(
    {
        **{name: st.just(value) for name, value in FIGURES.items()},
        "cpu_bandwidth_gbps": st.sampled_from([0.1, 0.3, 1.0, 3.0]),
        "cpu_gflops": st.sampled_from([0.05, 0.5, 5.0]),
        "gpu_gflops": st.sampled_from([0.5, 5.0, 500.0]),
        "link_latency_us": st.sampled_from([0.0, 10.0]),
        "link_bandwidth_gbps": st.sampled_from([0.3, 1.0, 3.0]),
        "contention": st.sampled_from([0.0, 0.3, 2.0]),
    }
)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    figures=machines,
    num_layers=st.integers(1, 5),
    num_experts=st.integers(2, 12),
    preferring=st.sampled_from([0.0, 1.0, 3.0]),
    chunk=st.sampled_from([40, 64, 200]),
    staging=st.sampled_from([1, 3, 8, 24]),
    slots=st.sampled_from([0.0, 0.3, 0.7]),
    dense_us=st.sampled_from([0.0, 50.0, 1000.0]),
)
def test_a_prompt_is_never_slower_for_it(
    seed: int,
    figures: dict[str, float],
    num_layers: int,
    num_experts: int,
    preferring: float,
    chunk: int,
    staging: int,
    slots: float,
    dense_us: float,
) -> None:
    random = np.random.default_rng(seed)
    preference = preferring * random.standard_normal((num_layers, num_experts))
    top_k = 2
    noise = random.gumbel(size=(3 * chunk + 35, num_layers, num_experts))
    ids = np.argsort(-(preference + noise), axis=2)[:, :, :top_k]
    common = {
        "chunk": chunk,
        "slots": round(slots * num_layers * num_experts),
        "num_experts": num_experts,
        "num_staging": staging,
        "dense_us": [dense_us] * (num_layers + 1),
        "prior_usage": np.exp(preference).reshape(-1).tolist(),
    }
    alone = simulate(ids, figures, ahead=False, **common)
    ahead = simulate(ids, figures, ahead=True, **common)
    assert ahead.total_us <= alone.total_us * (1 + 1e-9)


LAYERS, EXPERTS, TOP_K, WIDTH = 3, 12, 2, 16
SLOW = FIGURES | {
    "cpu_bandwidth_gbps": 0.02,
    "cpu_gflops": 0.05,
    "vram_bandwidth_gbps": 0.1,
    "link_bandwidth_gbps": 0.04,
}


@pytest.mark.parametrize("policy", ["payback", "lru", "static"])
@pytest.mark.parametrize("num_slots", [0, 9, 18])
def test_emulated_prompts_compute_the_same_in_the_simulators_time(policy: str, num_slots: int) -> None:
    random, pool = np.random.default_rng(8), ops.ThreadPool(2)
    store = _core.ExpertStore(EXPERTS, WIDTH, WIDTH, [("f32",) * 3] * LAYERS)
    for layer in range(LAYERS):
        experts = [
            tuple(weight_matrix(random.standard_normal((WIDTH, WIDTH)).astype(np.float32)) for _ in range(3))
            for _ in range(EXPERTS)
        ]
        store.put(pool, layer, 0, experts)
    machine = _core.MachineProfile.from_fields("slow", SLOW)
    cost = _core.CostModel(machine, store.expert_bytes, store.flops_per_token)
    chunk, num_tokens = 60, 200
    preference = random.standard_normal((LAYERS, EXPERTS))
    ids = np.argsort(-(preference + random.gumbel(size=(num_tokens, LAYERS, EXPERTS))), axis=2)[:, :, :TOP_K]
    ids = ids.astype(np.int32)

    # So much between layers that uploads have the time.
    flops = [1e4 * SLOW["gpu_gflops"]] * (LAYERS + 1)

    def config(stream_ahead_from: int) -> Any:
        return _core.SchedulerConfig(
            LAYERS, EXPERTS, TOP_K, num_slots, policy, stream_ahead_from=stream_ahead_from
        )

    emulated = _core.MoeExecutor.emulated(
        pool,
        store,
        cost=cost,
        config=config(33),
        dense=_core.DenseCost(bytes=[0.0] * (LAYERS + 1), flops_per_token=flops),
        preload=False,
    )
    plain = _core.MoeExecutor(pool, store)
    emulated.events_enabled = True
    layer_us = []
    for step, begin in enumerate(range(0, num_tokens, chunk)):
        rows = range(begin, min(begin + chunk, num_tokens))
        hidden = random.standard_normal((len(rows), WIDTH)).astype(np.float32)
        results = []
        for executor in (emulated, plain):
            out = hidden.copy()
            executor.begin_step(step, [0] * len(rows), list(rows))
            for layer in range(LAYERS):
                weights = np.full((len(rows), TOP_K), 0.5, np.float32)
                executor.forward(layer, hidden, np.ascontiguousarray(ids[rows, layer]), weights, out)
            executor.end_step()
            results.append(out)
        assert np.array_equal(*results)
        events = emulated.drain_events()["token_layer"]
        layer_us += [float(events["layer_us"][events["layer"] == layer][0]) for layer in range(LAYERS)]

    trace = _core.RoutingTrace(ids.astype(np.uint16), None, np.array([0, num_tokens], np.int64), EXPERTS)

    def simulated(stream_ahead_from: int) -> Any:
        return _core.simulate(
            trace,
            1,
            cost,
            config(stream_ahead_from),
            dense_us=[FIGURES["gpu_launch_us"] + 600.0] * (LAYERS + 1),
            prompt_chunk=chunk,
            keep_layer_us=True,
        )

    result = simulated(33)
    whole = LAYERS * (num_tokens // chunk)  # the last chunk is shorter, and so is what is between its layers
    assert result.layer_us.tolist()[:whole] == layer_us[:whole]
    assert result.total_us < simulated(0).total_us
