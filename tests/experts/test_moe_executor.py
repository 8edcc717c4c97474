"""The MoE executor against numpy, and the one promise everything rests on: outputs never depend on placement."""

from __future__ import annotations

import numpy as np
import pytest
from twofold import _core
from twofold import _testing as testing
from twofold.blocks import ops
from twofold.experts.profiles import load_profile

from tests.engine.model_runs import rounds_activations
from tests.experts.random_experts import EXPERTS, LAYERS, POLICIES, TOP_K, Model, batch, run
from tests.tiny_models.writing import weight_matrix

HIT, CPU, FETCHED = (int(_core.Placement.__members__[name]) for name in ("HIT", "CPU", "FETCHED"))
Event = _core.CacheEventKind


def emulated(pool, store, num_slots, policy="payback", profile="rtx4090-pcie4", prefetch=False, dense=1e6):
    costs = [dense] * (LAYERS + 1)
    machine = _core.MachineProfile.from_fields(profile, load_profile(profile).cost_figures)
    return _core.MoeExecutor.emulated(
        pool,
        store,
        cost=_core.CostModel(machine, store.expert_bytes, store.flops_per_token),
        config=_core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, num_slots, policy, prefetch),
        dense=_core.DenseCost(bytes=costs, flops_per_token=costs),
        preload=num_slots == LAYERS * EXPERTS,
    )


@pytest.fixture(scope="module")
def pool():
    return ops.ThreadPool(2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 65])
def test_equals_the_layer_worked_out_in_numpy(pool, dtype, num_tokens):
    model = Model(dtype)
    arrays = batch(num_tokens, seed=num_tokens)
    out = run(_core.MoeExecutor(pool, model.store), 1, arrays)
    expected = model.reference(1, *arrays)
    rounded = dtype == "bfloat16" and rounds_activations("bf16")
    assert np.abs(out - expected).max() < (2**-8 if rounded else 1e-5) * np.abs(expected).max()


def test_a_rows_result_does_not_depend_on_the_rows_beside_it(pool):
    model = Model("bfloat16")
    executor = _core.MoeExecutor(pool, model.store)
    normed, ids, weights, hidden = batch(33, seed=5)
    together = run(executor, 0, (normed, ids, weights, hidden))
    for t in (0, 7, 32):
        alone = run(executor, 0, tuple(a[t : t + 1] for a in (normed, ids, weights, hidden)))
        assert np.array_equal(alone[0], together[t])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_slots", [0, 2, 6, 9, LAYERS * EXPERTS])
def test_bit_identical_wherever_experts_run(pool, policy, num_slots):
    model = Model("bfloat16")
    plain, hybrid = _core.MoeExecutor(pool, model.store), emulated(pool, model.store, num_slots, policy)
    for step in range(25):
        arrays = batch(num_tokens=(1, 1, 4, 1, 30)[step % 5], seed=step)
        for layer in range(LAYERS):
            assert np.array_equal(run(plain, layer, arrays, step), run(hybrid, layer, arrays, step))
    counts = hybrid.counts()
    routed = LAYERS * TOP_K * sum((1, 1, 4, 1, 30)) * 5
    assert counts["hits"] + counts["cpu_misses"] + counts["fetched"] == routed
    if num_slots == LAYERS * EXPERTS:
        assert counts["hits"] == routed, "everything is resident"
    if num_slots == 0:
        assert counts["hits"] == 0


@pytest.mark.parametrize("policy", ["payback", "lru"])
@pytest.mark.parametrize("num_slots", [2, 6, 9])
def test_bit_identical_with_prefetch_whether_it_guesses_right_or_wrong(pool, policy, num_slots):
    model = Model("bfloat16")
    plain = _core.MoeExecutor(pool, model.store)
    # Dense layers that leave the link time for prefetches after the uploads of LRU, which admits every miss.
    hybrid = emulated(pool, model.store, num_slots, policy, prefetch=True, dense=1e7)
    random = np.random.default_rng(0)
    assert not testing.needs_look_ahead(plain)
    for step in range(60):
        num_tokens = (1, 1, 4)[step % 3]
        layers = [batch(num_tokens, seed=100 * step + layer) for layer in range(LAYERS)]
        outs = [arrays[3].copy() for arrays in layers]
        hybrid.begin_step(step, list(range(num_tokens)), [step + 1] * num_tokens)
        assert testing.needs_look_ahead(hybrid)
        for layer, (normed, ids, weights, _) in enumerate(layers):
            if layer + 1 < LAYERS:
                logits = random.normal(size=(num_tokens, EXPERTS)).astype(np.float32)
                if step % 10:
                    np.put_along_axis(logits, layers[layer + 1][1], 9.0, axis=1)
                hybrid.predict(layer + 1, logits)
            hybrid.forward(layer, normed, ids, weights, outs[layer])
        hybrid.end_step()
        for layer, arrays in enumerate(layers):
            assert np.array_equal(outs[layer], run(plain, layer, arrays, step))
    counts, prefetched = hybrid.counts(), hybrid.scheduler_counts()["prefetch"]
    assert prefetched["used"] > 0
    hybrid.idle()
    uploads = hybrid.drain_events()["upload"]
    assert len(uploads) == counts["uploads"]
    assert (uploads["reason"] == 2).sum() == prefetched["issued"]
    assert (uploads[uploads["reason"] == 2]["layer"] >= 1).all(), "nothing foresees the first layer"
    assert (uploads["end_us"] > uploads["begin_us"]).all()


def test_a_prompt_is_not_predicted(pool):
    model = Model()
    hybrid = emulated(pool, model.store, 6, prefetch=True)
    hybrid.begin_step(0, [0, 0, 0], [0, 1, 2])
    assert not testing.needs_look_ahead(hybrid)
    hybrid.begin_step(1, [0], [3])
    assert testing.needs_look_ahead(hybrid)
    hybrid.begin_step(2, list(range(33)), [4] * 33)
    assert not testing.needs_look_ahead(hybrid)
    off = emulated(pool, model.store, 6)
    off.begin_step(0, [0], [3])
    assert not testing.needs_look_ahead(off)


def test_hits_really_run_from_slot_memory(pool):
    """Change an expert in the store: a resident copy must not notice, the CPU must."""
    model, other = Model(seed=1), Model(seed=2)
    hybrid, plain = emulated(pool, model.store, LAYERS * EXPERTS), _core.MoeExecutor(pool, model.store)
    arrays = batch(6, seed=3)
    before = run(hybrid, 0, arrays)
    model.put(0, other.experts[0])
    assert np.array_equal(run(hybrid, 0, arrays), before)
    assert not np.array_equal(run(plain, 0, arrays), before)


def test_events_match_the_counters(pool):
    """Replaying the cache events gives the residency that the placements used, never more than there are slots."""
    num_slots = 7
    model = Model()
    hybrid = emulated(pool, model.store, num_slots, "lru")
    resident: dict[tuple[int, int], int] = {}
    in_flight: dict[tuple[int, int], int] = {}
    uploads = evictions = 0
    for step in range(60):
        hybrid.begin_step(step, [100 + step], [step])
        for event in hybrid.drain_events()["cache_event"]:
            assert event["kind"] == int(Event.PUBLISH), "only publications happen between steps"
            key = (int(event["layer"]), int(event["expert"]))
            resident[key] = in_flight.pop(key)
            assert resident[key] == event["slot"]
        for layer in range(LAYERS):
            normed, ids, weights, hidden = batch(1, seed=1000 + step * LAYERS + layer)
            hybrid.forward(layer, normed, ids, weights, hidden)
            events = hybrid.drain_events()
            (token,) = events["token_layer"]
            assert (token["step"], token["request"], token["position"], token["layer"]) == (
                step,
                100 + step,
                step,
                layer,
            )
            assert token["experts"][:TOP_K].tolist() == ids[0].tolist()
            assert np.array_equal(token["weights"][:TOP_K], weights[0])
            for expert, where in zip(token["experts"][:TOP_K], token["placement"], strict=False):
                assert (where == HIT) == ((layer, int(expert)) in resident), "a hit is a resident expert"
            assert token["num_hits"] + token["num_cpu"] + token["num_fetched"] == TOP_K
            assert token["layer_us"] >= max(token["cpu_us"], token["gpu_us"]) > 0
            for event in events["cache_event"]:
                key = (int(event["layer"]), int(event["expert"]))
                if event["kind"] == int(Event.EVICT):
                    evictions += 1
                    assert resident.pop(key) == event["slot"]
                elif event["kind"] == int(Event.ADMIT):
                    assert key not in resident
                    in_flight[key] = int(event["slot"])
            occupied = [*resident.values(), *in_flight.values()]
            assert len(occupied) == len(set(occupied)) <= num_slots
            uploads += int(np.count_nonzero(events["cache_event"]["kind"] == int(Event.ADMIT)))
        hybrid.end_step()
    assert hybrid.counts()["evictions"] == evictions > 0
    assert hybrid.counts()["uploads"] >= uploads > 0
    assert hybrid.counts()["h2d_bytes"] == hybrid.counts()["uploads"] * model.store.expert_bytes


def test_uploads_occupy_the_link_one_after_another(pool):
    model = Model()
    hybrid = emulated(pool, model.store, 9, "lru")
    for step in range(40):
        run(hybrid, step % LAYERS, batch(1, seed=step), step)
    hybrid.idle()
    uploads = np.sort(hybrid.drain_events()["upload"], order="begin_us")
    assert len(uploads) == hybrid.counts()["uploads"]
    assert np.all(uploads["begin_us"] >= uploads["queued_us"])
    assert np.all(uploads["end_us"] > uploads["begin_us"])
    assert np.all(uploads["begin_us"][1:] >= uploads["end_us"][:-1] - 1e-9), "two uploads at once on one link"


def test_virtual_time_moves_and_real_time_has_none(pool):
    model = Model()
    plain, hybrid = _core.MoeExecutor(pool, model.store), emulated(pool, model.store, 8)
    assert plain.virtual_now_us is None
    before = hybrid.virtual_now_us
    run(hybrid, 0, batch(1, seed=0))
    assert hybrid.virtual_now_us > before
    assert hybrid.device_bytes == (8 + EXPERTS) * -(-model.store.expert_bytes // 64) * 64, (
        "slots and one staged layer"
    )
    assert plain.device_bytes == 0


def test_events_can_be_switched_off_but_counts_stay(pool):
    model = Model()
    hybrid = emulated(pool, model.store, 8)
    hybrid.events_enabled = False
    run(hybrid, 0, batch(1, seed=0))
    assert all(len(rows) == 0 for rows in hybrid.drain_events().values())
    assert sum(hybrid.counts()[k] for k in ("hits", "cpu_misses", "fetched")) == TOP_K


def test_full_rings_drop_and_count(pool):
    model = Model()
    plain = _core.MoeExecutor(pool, model.store)
    arrays = batch(512, seed=1)
    for step in range(140):
        run(plain, 0, arrays, step)
    kept, dropped = len(plain.drain_events()["token_layer"]), plain.take_dropped()["token_layer"]
    assert kept == 1 << 16
    assert kept + dropped == 140 * 512
    assert plain.take_dropped()["token_layer"] == 0


@pytest.mark.parametrize("id_", [-1, EXPERTS])
def test_a_wrong_expert_id_is_refused_and_nothing_is_written(pool, id_):
    model = Model()
    normed, ids, weights, hidden = batch(2, seed=1)
    ids[1, 2] = id_
    executor = _core.MoeExecutor(pool, model.store)
    executor.begin_step(0, [0, 0], [0, 1])
    before = hidden.copy()
    with pytest.raises(IndexError, match=f"expert {id_} of {EXPERTS}"):
        executor.forward(0, normed, ids, weights, hidden)
    assert np.array_equal(hidden, before)


def test_wrong_shapes_and_layers_are_refused(pool):
    model = Model()
    executor = _core.MoeExecutor(pool, model.store)
    normed, ids, weights, hidden = batch(2, seed=1)
    executor.begin_step(0, [0, 0], [0, 1])
    with pytest.raises(ValueError, match=f"MoE layer {LAYERS} of {LAYERS}"):
        executor.forward(LAYERS, normed, ids, weights, hidden)
    with pytest.raises(ValueError, match="normed has shape"):
        executor.forward(0, normed[:, :-1].copy(), ids, weights, hidden)
    with pytest.raises(ValueError, match="began with 2 rows"):
        executor.forward(0, normed[:1], ids[:1], weights[:1], hidden[:1])
    with pytest.raises(TypeError):
        executor.forward(0, normed.astype(np.float64), ids, weights, hidden)
    gate, up, down = (weight_matrix(m) for m in model.experts[0][0])
    half = weight_matrix(model.experts[0][0][1].astype(np.float16))
    with pytest.raises(ValueError, match=r"expert 2: up is f16 \(40, 48\), expected f32 \(40, 48\)"):
        model.store.put(pool, 0, 2, [(gate, half, down)])
    with pytest.raises(ValueError, match=r"expert 1: down is f32 \(40, 48\), expected f32 \(48, 40\)"):
        model.store.put(pool, 0, 0, [(gate, up, down), (gate, up, gate)])
    for layer, first in ((LAYERS, 0), (-1, 0), (0, EXPERTS), (0, -1)):
        with pytest.raises(ValueError, match="outside a store"):
            model.store.put(pool, layer, first, [(gate, up, down)])


def test_an_unknown_policy_names_the_valid_ones(pool):
    with pytest.raises(ValueError, match=r"payback.*two-in-eight"):
        emulated(pool, Model().store, 8, policy="newest-first")


def forward_in_parts(model, executor, layer, batch_arrays):
    """A layer whose device share is worked out in numpy; the plan must share out every pair once."""
    normed, ids, weights, hidden = batch_arrays
    plan = executor.begin_layer(layer, ids, weights)
    times_placed = np.zeros(ids.size, np.int32)
    on_device = np.zeros_like(weights)
    for part, allowed in ((plan.ready(), {HIT, FETCHED}), (plan.awaited(), {FETCHED}), (plan.on_cpu, {CPU})):
        assert part.begin[0] == 0
        assert part.begin[-1] == len(part.pairs)
        assert len(part.addresses) == len(part.experts) == len(part)
        for expert, begin, end in zip(part.experts, part.begin, part.begin[1:], strict=False):
            pairs = part.pairs[begin:end]
            assert (ids.reshape(-1)[pairs] == expert).all()
            assert set(plan.where[pairs].tolist()) <= allowed
            times_placed[pairs] += 1
            if 1 not in allowed:
                on_device.reshape(-1)[pairs] = weights.reshape(-1)[pairs]
    assert (times_placed == 1).all()
    where = plan.where.copy()
    rows = np.full_like(normed, np.nan)
    executor.compute_cpu(normed, rows)
    executor.end_layer(-1.0)
    return model.reference(layer, normed, ids, on_device, hidden) + rows, where


@pytest.mark.parametrize("num_slots", [0, 7, LAYERS * EXPERTS])
def test_a_layer_in_parts_is_placed_recorded_and_summed_as_in_one(pool, num_slots):
    model = Model()
    whole, parts = (emulated(pool, model.store, num_slots) for _ in range(2))
    whole.events_enabled = parts.events_enabled = True
    seen = set()
    for step in range(12):
        arrays = [batch(1 if step % 3 else 17, seed=10 * step + layer) for layer in range(LAYERS)]
        for executor in (whole, parts):
            rows = len(arrays[0][1])
            executor.begin_step(step, [step] * rows, list(range(rows)))
        for layer in range(LAYERS):
            normed, ids, weights, hidden = arrays[layer]
            expected = hidden.copy()
            whole.forward(layer, normed, ids, weights, expected)
            out, where = forward_in_parts(model, parts, layer, arrays[layer])
            seen.update(where.tolist())
            assert np.abs(out - expected).max() < 1e-4 * np.abs(expected).max()
        whole.end_step()
        parts.end_step()
        assert whole.counts() == parts.counts()
        assert whole.virtual_now_us == parts.virtual_now_us
    mine, theirs = whole.drain_events(), parts.drain_events()
    assert all(np.array_equal(mine[kind], theirs[kind]) for kind in mine)
    assert seen == ({0} if num_slots == LAYERS * EXPERTS else {1} if num_slots == 0 else {0, 1, 2})


def test_the_parts_of_a_layer_come_in_their_order(pool):
    executor = _core.MoeExecutor(pool, Model().store)
    normed, ids, weights, hidden = batch(2, seed=1)
    executor.begin_step(0, [0, 0], [0, 1])
    for call in (lambda: executor.compute_cpu(normed, hidden), lambda: executor.end_layer(1.0)):
        with pytest.raises(RuntimeError, match="before begin_layer"):
            call()
    executor.begin_layer(0, ids, weights)
    with pytest.raises(RuntimeError, match="layer 0 has not ended"):
        executor.begin_layer(1, ids, weights)
    with pytest.raises(ValueError, match=r"rows has shape \(1, 48\), expected \(2, 48\)"):
        executor.compute_cpu(normed, hidden[:1].copy())
    executor.begin_step(1, [0, 0], [0, 1])  # a step that was given up is forgotten
    executor.begin_layer(1, ids, weights)
