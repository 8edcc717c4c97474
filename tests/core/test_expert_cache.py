"""The expert cache: invariants under random use, policies against small Python oracles, warm start."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold import _core
from twofold import _testing as testing

State = testing.ExpertState
ONLINE = [policy.name for policy in _core.cache_policies() if not policy.offline]


def make(policy="lru", layers=2, experts=8, top_k=2, slots=3, price=0.67, **kwargs) -> testing.ExpertCache:
    per_layer = slots if isinstance(slots, list) else [slots] * layers
    return testing.ExpertCache(
        testing.CacheConfig(layers, experts, top_k, per_layer, policy, price, **kwargs)
    )


def routing(*rows) -> np.ndarray:
    return np.array(rows, dtype=np.int32)


@st.composite
def scripts(draw):
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(4, 10))
    top_k = draw(st.integers(1, 3))
    slots = [draw(st.integers(0, experts)) for _ in range(layers)]
    steps = []
    for _ in range(draw(st.integers(1, 25))):
        tokens = draw(st.integers(1, 3))
        rows = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
        steps.append((draw(st.integers(0, layers - 1)), rows, draw(st.booleans()), draw(st.booleans())))
    pins = draw(
        st.just([]) | st.lists(st.sampled_from(["auto", "cpu", "gpu"]), min_size=layers, max_size=layers)
    )
    for layer, pin in enumerate(pins):
        slots[layer] = {"auto": slots[layer], "cpu": 0, "gpu": experts}[pin]
    return layers, experts, top_k, slots, steps, pins


@pytest.mark.parametrize("policy", ONLINE)
@settings(max_examples=30, deadline=None)
@given(script=scripts(), pool=st.booleans())
def test_invariants(policy, script, pool):
    layers, experts, top_k, slots, steps, pins = script
    cache = testing.ExpertCache(
        testing.CacheConfig(layers, experts, top_k, slots, policy, 0.2, shared_pool=pool, pins=pins)
    )
    in_flight: list[int] = []
    for layer, rows, forced, publish in steps:
        ids = routing(*rows)
        cache.observe(layer, ids, None)
        routed = set(ids.ravel().tolist())
        assert cache.active(layer) == sorted(routed)
        for expert in sorted(routed):
            before = {s: cache.occupant(s) for s in range(cache.num_slots)}
            requested = cache.can_admit(layer, expert, forced)
            assert before == {s: cache.occupant(s) for s in range(cache.num_slots)}
            done = cache.admit(layer, expert, forced)
            assert (requested is None) == (done is None)
            if done is None:
                assert cache.last_refusal != testing.AdmitRefusal.NONE
                continue
            assert (requested.slot, requested.evicted) == (done.slot, done.evicted)
            assert cache.state(layer, expert) == State.IN_FLIGHT
            assert done.slot not in in_flight, "a slot in flight was taken"
            if not pool:
                assert cache.slot_offset(layer) <= done.slot < cache.slot_offset(layer) + slots[layer]
            if done.evicted >= 0:
                assert not (done.evicted_layer == layer and done.evicted in routed), (
                    "a routed expert was evicted"
                )
                assert cache.state(done.evicted_layer, done.evicted) == State.ABSENT
            in_flight.append(done.slot)
        if publish:
            for slot in in_flight:
                cache.publish(slot)
            in_flight.clear()
        # Every slot and every expert agree about each other.
        for la in range(layers):
            for e in range(experts):
                slot = cache.slot_of(la, e)
                assert (slot < 0) == (cache.state(la, e) == State.ABSENT)
                assert slot < 0 or cache.occupant(slot) == la * experts + e
        for la, pin in enumerate(pins):
            states = {cache.state(la, e) for e in range(experts)}
            assert pin == "auto" or states == {State.ABSENT if pin == "cpu" else State.RESIDENT}


def test_lru_against_an_oracle():
    rng = np.random.default_rng(1)
    cache = make("lru", layers=1, experts=12, top_k=2, slots=5)
    last_use: dict[int, int] = {}  # of residents
    for now in range(400):
        ids = rng.choice(12, size=(1, 2), replace=False).astype(np.int32)
        assert sorted(last_use) == [e for e in range(12) if cache.state(0, e) == State.RESIDENT]
        cache.observe(0, ids)
        routed = ids[0].tolist()
        last_use.update({e: now for e in routed if e in last_use})
        for e in routed:
            if e in last_use:
                continue
            admission = cache.admit(0, e)
            if len(last_use) == 5:  # two of one event are equally old: either may go
                assert last_use[admission.evicted] == min(last_use.values())
                del last_use[admission.evicted]
            else:
                assert admission.evicted == -1
            last_use[e] = now
            cache.publish(admission.slot)


def test_two_in_eight_admits_at_the_second_use():
    cache = make("two-in-eight", layers=1, experts=8, top_k=1, slots=2)
    cache.observe(0, routing([3]))
    assert cache.admit(0, 3) is None
    assert cache.last_refusal == testing.AdmitRefusal.PRICE
    for e in range(4, 8):
        cache.observe(0, routing([e]))
    cache.observe(0, routing([3]))
    assert cache.admit(0, 3) is not None


def test_static_keeps_the_most_used_of_before():
    prior = [0, 5, 9, 1, 0, 0, 0, 0, 7, 0, 0, 3, 0, 0, 0, 0]
    cache = make("static", slots=2, prior_usage=prior)
    assert sorted(cache.preload_by_usage()) == [1, 2, 8, 11]
    for _ in range(20):
        cache.observe(0, routing([6, 7]))
        assert cache.admit(0, 6) is None
    assert cache.slot_of(0, 1) >= 0


def test_belady_evicts_the_furthest_next_use():
    cache = make("belady", layers=1, experts=4, top_k=1, slots=2)
    order = [0, 1, 2, 1, 2, 0]
    cache.set_future([[[e] for e in order]])
    evicted = []
    for e in order:
        cache.observe(0, routing([e]))
        if cache.state(0, e) == State.ABSENT and (admission := cache.admit(0, e)):
            evicted.append(admission.evicted)
            cache.publish(admission.slot)
    assert evicted == [-1, -1, 0]  # 2 replaces 0 (needed last); 0 comes too late to be worth a slot


def test_oracle_value_is_the_discounted_sum_of_uses():
    cache = make("oracle-payback", layers=1, experts=4, top_k=1, slots=2)
    order = [0, 1, 0, 2, 0, 3]
    cache.set_future([[[e] for e in order]])
    cache.observe(0, routing([0]))
    assert cache.value(0, 0) == pytest.approx(0.98**1 + 0.98**3)
    assert cache.value(0, 1) == pytest.approx(1.0)
    assert cache.value(0, 3) == pytest.approx(0.98**4)


def test_offline_policies_need_a_future_and_online_ones_refuse_it():
    with pytest.raises(ValueError, match="set_future"):
        make("belady").observe(0, routing([0, 1]))
    with pytest.raises(ValueError, match="online policy"):
        make("lru").set_future([[], []])


def test_payback_prices_uploads():
    rng = np.random.default_rng(5)
    popularity = 1 / np.arange(1, 17)
    popularity /= popularity.sum()
    rows = []
    for _ in range(8):  # eight topics, each with its own favourites
        order = rng.permutation(16)
        rows += [order[rng.choice(16, size=(1, 2), replace=False, p=popularity)] for _ in range(200)]
    uploads = []
    for price in (0.0, 0.67, 3.0, 1e6):
        cache = make("payback", layers=1, experts=16, top_k=2, slots=4, price=price)
        count = 0
        for ids in rows:
            cache.observe(0, ids.astype(np.int32))
            for e in cache.active(0):
                if cache.state(0, e) == State.ABSENT and (admission := cache.admit(0, e)):
                    cache.publish(admission.slot)
                    count += 1
        uploads.append(count)
    assert uploads[0] > uploads[1] > uploads[2] > uploads[3] == 0


def test_a_pool_takes_from_the_layer_that_misses_it_least():
    cache = make("lru", layers=2, slots=3, top_k=1, shared_pool=True)
    for expert in range(4):
        cache.observe(0, routing([expert]))
        cache.publish(cache.admit(0, expert).slot)
    for expert in range(2):
        cache.observe(1, routing([expert]))
        cache.publish(cache.admit(1, expert).slot)
    assert [cache.num_held(layer) for layer in (0, 1)] == [4, 2]
    cache.observe(1, routing([5]))
    admission = cache.admit(1, 5)
    assert (admission.evicted_layer, admission.evicted) == (0, 0), "the oldest of all layers"
    assert cache.occupant(admission.slot) == 1 * 8 + 5
    assert [cache.num_held(layer) for layer in (0, 1)] == [3, 3]


def test_a_pool_leaves_every_layer_its_top_k():
    cache = make("lru", layers=2, slots=2, top_k=2, shared_pool=True)
    for layer, pair in ((0, [0, 1]), (1, [2, 3])):
        cache.observe(layer, routing(pair))
        for expert in pair:
            cache.publish(cache.admit(layer, expert).slot)
    cache.observe(1, routing([4, 5]))
    for _ in range(2):  # older experts of layer 0 stay: two slots are its floor
        assert cache.admit(1, 4 + _).evicted_layer == 1
    assert [cache.num_held(layer) for layer in (0, 1)] == [2, 2]


def test_payback_reads_between_buckets(tmp_path):
    """Against the saved state in float64: 8 cells around the usages at two rents, rows of the experts just used."""
    rng = np.random.default_rng(1)
    popular = rng.dirichlet(np.full(16, 0.5)) * 0.9 + 0.1 / 16
    cache = make("payback", layers=1, experts=16, top_k=2, slots=4)
    for event in range(700):
        if event in (690, 699):
            cache.boundary()  # the end is read with a young request's half of the table; the last event teaches no row
        chosen = rng.choice(16, 2, replace=False, p=popular)
        cache.observe(0, chosen[None].astype(np.int32), None)
        for expert in map(int, chosen):
            if admission := cache.admit(0, expert):
                cache.publish(admission.slot)
    cache.save(str(tmp_path / "state"))
    state = np.frombuffer((tmp_path / "state").read_bytes()[56:])[2 * 16 :]
    rents = np.array([0.001, 0.004, 0.01, 0.02, 0.04, 0.08, 0.16, 0.27, 0.4, 0.55, 0.75, 0.95])
    shape = (2, 8, 16, 12, 8)  # youth, long-run usage, age, usage of the request, fast usage
    cells = int(np.prod(shape))
    worth = state[: cells * 13].reshape(*shape, 13)[..., :12]
    rent, events = state[cells * 13 : cells * 13 + 2]
    ages = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512]
    histories, rows, (foretold, printed) = np.split(state[cells * 13 + 2 :], [16 * 4, -2])
    context = (
        foretold / (printed + 1) * rows.reshape(4, 16, 16)[0, chosen].sum(axis=0)
    )  # the layer itself has experts; none before it has
    assert foretold < printed
    assert np.abs(context).max() > 0
    for expert, (age, *usages) in enumerate(histories.reshape(16, 4)):
        table = worth[0 if events < 16 else 1][:, np.searchsorted(ages, age, "right") - 1]
        at_rent = np.apply_along_axis(lambda lanes: np.interp(rent, rents, lanes), -1, table)
        places = [
            np.clip(np.sqrt(u) * n - 0.5, 0, last)
            for u, n, last in zip(
                (usages[2], usages[0], usages[1]), (8 * 1.3, 12, 8), (7, 11, 7), strict=True
            )
        ]
        for place, count in zip(places, (8, 12, 8), strict=True):
            below = min(count - 2, int(place))
            at_rent = at_rent[below] + (place - below) * (at_rent[below + 1] - at_rent[below])
        assert cache.value(0, expert) == pytest.approx(at_rent + context[expert], abs=1e-4), expert


def test_payback_learns_what_follows_what():
    """Experts come in a fixed cycle of equally used pairs: only the last pair predicts the next."""
    rng = np.random.default_rng(2)
    cache = make("payback", layers=1, experts=16, top_k=2, slots=4)
    follower = np.roll(np.arange(8), 1)
    pair = 0
    for _ in range(6000):
        pair = int(follower[pair]) if rng.random() < 0.7 else int(rng.integers(8))
        cache.observe(0, routing([2 * pair, 2 * pair + 1]))
        for expert in (2 * pair, 2 * pair + 1):
            if admission := cache.admit(0, expert):
                cache.publish(admission.slot)
    values = np.array([cache.value(0, expert) for expert in range(16)]).reshape(8, 2).sum(axis=1)
    others = np.delete(values, [pair, follower[pair]])
    assert values[follower[pair]] > others.max() + 0.2


def test_payback_refreshes_wide_layers_in_turn(tmp_path):
    """Values of the experts just used are new, the others' at most 300 / 32 events old; a saved state gives all."""
    rng = np.random.default_rng(5)
    popular = rng.dirichlet(np.full(300, 0.3)) * 0.9 + 0.1 / 300
    cache = make("payback", layers=1, experts=300, top_k=4, slots=60)
    for event in range(400):
        chosen = rng.choice(300, 4, replace=False, p=popular).astype(np.int32)
        cache.observe(0, chosen[None])
        if event % 80 == 79:
            cache.save(str(tmp_path / "state"))
            again = make("payback", layers=1, experts=300, top_k=4, slots=60)
            again.load(str(tmp_path / "state"))
            kept, new = (
                np.array([each.value(0, expert) for expert in range(300)]) for each in (cache, again)
            )
            assert kept[chosen] == pytest.approx(new[chosen], abs=1e-5)
            assert np.corrcoef(kept, new)[0, 1] > 0.9
        for expert in map(int, chosen):
            if admission := cache.admit(0, expert):
                cache.publish(admission.slot)
    rows = np.frombuffer((tmp_path / "state").read_bytes()[:-16])
    assert len(rows) < 2 * 24_576 * 13  # no row of each pair of experts


def test_payback_pools_by_default():
    for policy, shared, pooled in (("payback", None, True), ("payback", False, False), ("lru", None, False)):
        cache = make(policy, layers=2, slots=2, top_k=1, shared_pool=shared)
        for expert in range(4):
            cache.preload(0, expert)
        assert cache.num_held(0) == (4 if pooled else 2)


def test_cancel_gives_the_slot_back():
    cache = make("lru", layers=1, slots=1)
    cache.observe(0, routing([4, 5]))
    slot = cache.admit(0, 4, True).slot
    cache.cancel(slot)
    assert cache.state(0, 4) == State.ABSENT
    assert cache.admit(0, 5, True).slot == slot
    with pytest.raises(ValueError, match="in flight expected"):
        cache.publish(99)


def test_spread_slots():
    assert testing.spread_slots(7, 3, 8) == [3, 2, 2]
    assert testing.spread_slots(99, 3, 8) == [8, 8, 8]
    assert testing.spread_slots(2, 3, 8) == [1, 1, 0]
    pins = ["auto", "gpu", "cpu", "auto"]
    assert testing.spread_slots(7, 4, 4, pins) == [2, 4, 0, 1]
    assert testing.spread_slots(99, 4, 4, pins) == [4, 4, 0, 4]
    assert testing.spread_slots(3, 2, 4, ["cpu", "cpu"]) == [0, 0]
    with pytest.raises(ValueError, match="num_slots = 3 given, at least 4, all experts of the layers"):
        testing.spread_slots(3, 4, 4, pins)


@pytest.mark.parametrize("policy", ["payback", "lru"])
def test_warm_start(tmp_path, policy):
    rng = np.random.default_rng(3)
    cache = make(policy)
    for _ in range(300):
        for layer in (0, 1):
            ids = np.minimum(rng.choice(8, size=(1, 2), replace=False), 5).astype(np.int32)
            ids[0, 1] = ids[0, 0] ^ 1
            cache.observe(layer, ids)
            for expert in cache.active(layer):
                if admission := cache.admit(layer, expert):
                    cache.publish(admission.slot)
    path = str(tmp_path / "cache.bin")
    cache.save(path)
    again = make(policy)
    order = again.load(path)
    resident = {la * 8 + e for la in range(2) for e in range(8) if cache.state(la, e) == State.RESIDENT}
    assert set(order[: len(resident)]) == resident
    assert sorted(order) == list(range(16))
    if policy == "payback":
        for c in (cache, again):  # values are taken when a layer is observed; a new text follows from nothing
            c.boundary()
            c.observe(1, routing([0, 1]))
        assert [again.value(1, e) for e in range(8)] == pytest.approx([cache.value(1, e) for e in range(8)])


def test_warm_start_refuses_foreign_and_damaged_files(tmp_path):
    path = tmp_path / "cache.bin"
    make("payback").save(str(path))
    with pytest.raises(RuntimeError, match="made for 2 layers x 8 experts, top-2, policy payback"):
        make("lru").load(str(path))
    with pytest.raises(RuntimeError, match="made for"):
        make("payback", experts=9).load(str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RuntimeError, match="ends early"):
        make("payback").load(str(path))
    path.write_bytes(b"something else entirely, of some length" * 10)
    with pytest.raises(RuntimeError, match="not a Twofold cache file"):
        make("payback").load(str(path))
    with pytest.raises(RuntimeError, match="cannot be opened"):
        make("payback").load(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"policy": "lur"}, "policy 'lur' given, one of payback, lru, .* expected"),
        ({"layers": -1, "slots": []}, "num_layers = -1"),
        ({"top_k": 9}, "top_k = 9"),
        ({"slots": [3]}, "slots_per_layer = 1 entries"),
        ({"slots": 9}, "slots_per_layer = 9"),
        ({"price": -1.0}, "upload_price = -1"),
        ({"prior_usage": [1.0]}, "prior_usage = 1 entries"),
        ({"pins": ["gpu"]}, "pins = 1 entries"),
        ({"pins": ["gpu", "cuda"]}, "a layer's pin is cuda"),
        (
            {"pins": ["gpu", "auto"], "slots": 6},
            "slots_per_layer = 6 given, num_experts for layer 0, which is pinned",
        ),
        ({"pins": ["gpu", "gpu"], "shared_pool": True}, "slots_per_layer = 6 in all given, at least the 16"),
    ],
)
def test_bad_configuration_is_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


def test_bad_routing_is_named():
    cache = make()
    with pytest.raises(ValueError, match="expert 8 given"):
        cache.observe(0, routing([1, 8]))
    with pytest.raises(ValueError, match="num_tokens"):
        cache.observe(0, routing([1]))
    with pytest.raises(ValueError, match="layer 5"):
        cache.observe(5, routing([1, 2]))
