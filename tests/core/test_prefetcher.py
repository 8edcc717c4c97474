"""The prefetcher: it saves time, delays no other upload, leaks no slot, and measures itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold import _core
from twofold import _testing as testing
from twofold.experts.profiles import load_profile

LAYERS, EXPERTS, TOP_K = 4, 16, 3
SMALL_EXPERT = (100e3, 100e3)  # bytes, flops per token: an upload takes 14 us on PCIe 4
QWEN3_30B_EXPERT = (9.44e6, 9.44e6)  # 387 us


def cost_model(expert=SMALL_EXPERT, profile="rtx4090-pcie4", **changes):
    figures = load_profile(profile).cost_figures | changes
    return testing.CostModel(_core.MachineProfile.from_fields(profile, figures), *expert)


def scheduler(cost, num_slots=LAYERS * 6, policy="payback", prefetch=True):
    return make_scheduler(cost, LAYERS, EXPERTS, TOP_K, num_slots, policy, prefetch)


def make_scheduler(cost, *shape_and_policy):
    config = _core.SchedulerConfig(*shape_and_policy)
    return testing.LayerScheduler(cost, config, testing.Timeline(cost.upload_us()))


def routing(steps, seed=0, stickiness=0.5):
    """ids [steps, layers, top_k]: every expert of a step stays for the next one with probability `stickiness`."""
    random = np.random.default_rng(seed)
    ids = np.zeros((steps, LAYERS, TOP_K), np.int32)
    for layer in range(LAYERS):
        now = list(random.permutation(EXPERTS)[:TOP_K])
        for step in range(steps):
            for k in range(TOP_K):
                if random.random() > stickiness:
                    now[k] = random.choice([e for e in range(EXPERTS) if e not in now])
            ids[step, layer] = now
    return ids


def foresight(ids, random, right=0.8):
    """Logits [1, experts] whose top-k names each of `ids` with probability `right`."""
    logits = random.normal(0, 0.1, EXPERTS).astype(np.float32)
    for expert in ids:
        logits[expert if random.random() < right else random.integers(EXPERTS)] += 2
    return logits[None]


def play(s, ids, *, predict=True, right=0.8, gap_us=8.0, seed=1):
    """Runs the steps; returns (step, layer, times, moves, hits, arrived) of each layer, and the clock at the end."""
    random = np.random.default_rng(seed)
    seen = []
    for step, layers in enumerate(ids):
        s.begin_step()
        for layer, routed in enumerate(layers):
            s.advance(gap_us)
            if predict and layer + 1 < LAYERS:
                s.predict(layer + 1, foresight(layers[layer + 1], random, right))
            decision = s.decide(layer, routed[None])
            hits = [e.expert for e in decision.experts if e.where == _core.Placement.HIT]
            seen.append((step, layer, decision.times, list(decision.moves), hits, decision.arrived))
        s.advance(gap_us)
    return seen, s.now_us


def test_right_predictions_turn_misses_into_hits_and_save_time():
    ids = routing(120)
    cost = cost_model()
    plain, plain_us = play(scheduler(cost, prefetch=False), ids, predict=False)
    s = scheduler(cost)
    ahead, ahead_us = play(s, ids, right=1.0)
    assert sum(len(hits) for *_, hits, _ in ahead) > 1.1 * sum(len(hits) for *_, hits, _ in plain)
    assert ahead_us < 0.98 * plain_us
    counts = s.counts()["prefetch"]
    assert counts["used"] > 50
    assert counts["used"] > 0.75 * counts["issued"]


def test_a_landed_prefetch_is_a_hit_of_the_very_next_layer():
    s = scheduler(cost_model())
    ids = routing(80)
    seen, _ = play(s, ids, right=1.0)
    fresh = [set(arrived) & set(ids[step, layer]) for step, layer, _, _, _, arrived in seen]
    for (_, _, _, _, hits, _), arrived in zip(seen, fresh, strict=True):
        assert arrived <= set(hits)
    assert sum(map(len, fresh)) == s.counts()["prefetch"]["used"] > 0


def test_precision_and_recall_are_those_of_the_predictions():
    s = scheduler(cost_model(), num_slots=0)  # nothing is ever resident: recall on misses is recall
    play(s, routing(100), right=1.0)
    counts = s.counts()["prefetch"]
    assert (
        counts["predicted"]
        == counts["correct"]
        == counts["misses"]
        == counts["foreseen"]
        == 100 * (LAYERS - 1) * TOP_K
    )
    wrong = scheduler(cost_model(), num_slots=0)
    play(wrong, routing(100), right=0.0)
    chance = TOP_K / EXPERTS
    assert wrong.counts()["prefetch"]["correct"] / wrong.counts()["prefetch"]["predicted"] == pytest.approx(
        chance, abs=0.05
    )


def test_useless_predictions_cost_next_to_nothing():
    s = scheduler(cost_model())
    _, with_us = play(s, routing(120), right=0.0)
    _, without_us = play(scheduler(cost_model(), prefetch=False), routing(120), predict=False)
    assert with_us < 1.01 * without_us


def test_uploads_too_long_for_one_layer_are_dropped_and_cost_nothing():
    ids = routing(60)
    slow = cost_model(QWEN3_30B_EXPERT, link_bandwidth_gbps=1.0)
    s = scheduler(slow)
    seen, with_us = play(s, ids, right=1.0)
    _, without_us = play(scheduler(slow, prefetch=False), ids, predict=False)
    assert not [m for *_, moves, _, _ in seen for m in moves if m.reason == _core.UploadReason.PREFETCH]
    assert s.counts()["prefetch"]["issued"] == 0
    assert s.counts()["prefetch"]["dropped"] > 0
    assert with_us <= 1.01 * without_us


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.floats(0.0, 1.0),
    st.sampled_from([SMALL_EXPERT, QWEN3_30B_EXPERT]),
    st.sampled_from(["rtx4090-pcie4", "rtx3060-pcie3"]),
    st.floats(0.0, 200.0),
    st.integers(0, LAYERS * EXPERTS),
    st.sampled_from(["payback", "lru"]),
)
def test_no_demand_upload_waits_for_a_prefetch_and_no_slot_leaks(
    seed, right, expert, profile, gap_us, slots, policy
):
    cost = cost_model(expert, profile)
    s = scheduler(cost, num_slots=slots, policy=policy)
    seen, _ = play(s, routing(15, seed), right=right, gap_us=gap_us, seed=seed)
    # The same uploads on a link without the prefetches: no demand upload ends earlier there.
    link = testing.Timeline(cost.upload_us())
    tag = 0
    plain = {}
    for step, layer, times, moves, _, _ in seen:
        link.advance(gap_us)
        for move in moves:
            tag += 1
            if move.reason == _core.UploadReason.DEMAND:
                plain[step, layer, move.expert] = link.upload(tag).end_us
            elif move.reason == _core.UploadReason.ADMISSION:
                link.upload(tag, testing.UploadLane.BACKGROUND)
        link.advance(times.layer_us)
        if layer == LAYERS - 1:
            link.advance(gap_us)
    for step, layer, _, moves, _, _ in seen:
        for move in moves:
            if move.reason == _core.UploadReason.DEMAND:
                assert move.end_us <= plain[step, layer, move.expert] + 1e-6

    counts = s.counts()["prefetch"]
    assert counts["issued"] == counts["used"] + counts["late"] + counts["wasted"]
    assert counts["late"] == 0  # gaps never shrink here
    s.drain()
    s.begin_step()
    states = [s.state(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
    assert testing.ExpertState.IN_FLIGHT not in states
    held = [s.occupant(slot) for slot in range(s.num_slots) if s.occupant(slot) >= 0]
    assert len(held) == len(set(held)) == states.count(testing.ExpertState.RESIDENT) <= slots


def test_a_gap_that_shrinks_makes_a_prefetch_late_or_withdrawn_but_loses_no_slot():
    s = scheduler(cost_model(), num_slots=LAYERS * 6)
    ids = routing(80)
    play(s, ids[:50], right=1.0, gap_us=30.0)
    play(s, ids[50:], right=1.0, gap_us=0.0)
    s.drain()
    s.begin_step()
    states = [s.state(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
    assert testing.ExpertState.IN_FLIGHT not in states
    counts = s.counts()["prefetch"]
    assert counts["issued"] == counts["used"] + counts["late"] + counts["wasted"]


def test_a_resident_expert_that_is_predicted_is_not_evicted():
    s = make_scheduler(cost_model(), 2, 8, 2, 4, "payback", True)
    for expert in (0, 1):
        assert s.preload(1, expert)
    for _ in range(30):
        s.begin_step()
        logits = np.zeros((1, 8), np.float32)
        logits[0, [0, 1]] = 5.0
        logits[0, [2, 3]] = 4.9
        s.predict(1, logits)
        s.decide(0, np.array([[4, 5]], np.int32))
        s.advance(50.0)
        s.decide(1, np.array([[0, 1]], np.int32))
        assert s.state(1, 0) == s.state(1, 1) == testing.ExpertState.RESIDENT


def test_batches_are_predicted_row_by_row():
    s = scheduler(cost_model())
    s.begin_step()
    logits = np.zeros((2, EXPERTS), np.float32)
    logits[0, [1, 2, 3]] = 3
    logits[1, [3, 4, 5]] = 3
    s.predict(1, logits)
    s.decide(0, np.array([[7, 8, 9], [7, 8, 10]], np.int32))
    s.decide(1, np.array([[1, 2, 3], [3, 4, 6]], np.int32))
    counts = s.counts()["prefetch"]
    assert (counts["predicted"], counts["correct"]) == (5, 4)  # 1 2 3 4 5, of which 5 was not routed
    assert (counts["misses"], counts["foreseen"]) == (5, 4)  # 1 2 3 4 6, of which 6 was not foreseen


def test_wrong_input_is_refused():
    s = scheduler(cost_model())
    s.begin_step()
    with pytest.raises(ValueError, match="16 of layers 0"):
        s.predict(1, np.zeros((1, EXPERTS + 1), np.float32))
    with pytest.raises(ValueError, match="for layer 4"):
        s.predict(LAYERS, np.zeros((1, EXPERTS), np.float32))
    with pytest.raises(RuntimeError, match="without LayerSchedulerConfig::prefetch"):
        scheduler(cost_model(), prefetch=False).predict(1, np.zeros((1, EXPERTS), np.float32))
