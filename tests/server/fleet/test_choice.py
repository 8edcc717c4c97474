"""The choice of a replica, by hand-made cases and a simulation of conversations."""

from random import Random

import pytest
from twofold.server.fleet.choice import ReplicaLoad, matched, ranked

LABELS = (b"a", b"b", b"c")


def test_the_longest_cached_prefix_comes_first() -> None:
    replicas = {
        "one": ReplicaLoad({b"a"}),
        "two": ReplicaLoad({b"a", b"b"}, num_ongoing=5),
        "none": ReplicaLoad(),
    }
    assert [matched(LABELS, load) for load in replicas.values()] == [1, 2, 0]
    assert ranked(LABELS, replicas, Random(0))[0] == ["two"]


def test_among_equal_prefixes_the_shorter_queue_then_the_emptier_cache_comes_first() -> None:
    replicas = {
        "busy": ReplicaLoad({b"c"}, num_ongoing=3),
        "full": ReplicaLoad({b"c"}, num_ongoing=1, kv_usage=0.9),
        "free": ReplicaLoad({b"c"}, num_ongoing=1, kv_usage=0.1),
    }
    assert ranked(LABELS, replicas, Random(0)) == [["free", "full", "busy"]]


@pytest.mark.parametrize(
    ("num_ongoing", "kv_usage", "is_first"),
    [(8, 0.0, True), (9, 0.0, False), (0, 0.94, True), (0, 0.95, False)],
)
def test_an_overloaded_or_full_replica_loses_its_precedence(
    num_ongoing: int, kv_usage: float, is_first: bool
) -> None:
    replicas = {"cached": ReplicaLoad({b"c"}, num_ongoing, kv_usage), "idle": ReplicaLoad()}
    assert (ranked(LABELS, replicas, Random(0))[0] == ["cached"]) is is_first


@pytest.mark.parametrize(
    ("tpot_ms", "num_ongoing", "is_first"),
    [(29.0, 4, True), (31.0, 1, True), (31.0, 4, False), (0.0, 4, True)],
)
def test_a_slow_replica_loses_its_precedence_earlier(
    tpot_ms: float, num_ongoing: int, is_first: bool
) -> None:
    replicas = {
        "cached": ReplicaLoad({b"c"}, num_ongoing, tpot_ms=tpot_ms),
        "fast": ReplicaLoad(tpot_ms=10.0),
    }
    assert (ranked(LABELS, replicas, Random(0))[0] == ["cached"]) is is_first


def test_without_a_prefix_a_slow_replica_gets_fewer_requests_than_a_fast_one() -> None:
    replicas = {
        "slow": ReplicaLoad(num_ongoing=1, tpot_ms=50.0),
        "fast": ReplicaLoad(num_ongoing=8, tpot_ms=10.0),
    }
    assert ranked((), replicas, Random(0))[0] == ["fast", "slow"]


def test_without_a_prefix_a_replica_with_the_model_is_preferred_unless_overloaded() -> None:
    replicas = {
        "has it": ReplicaLoad(num_ongoing=8),
        "idle": ReplicaLoad(has_model=False),
        "also idle": ReplicaLoad(has_model=False),
    }
    assert ranked((), replicas, Random(0))[0] == ["has it"]
    replicas["has it"] = ReplicaLoad(num_ongoing=9)
    leaders = {ranked((), replicas, Random(seed))[0][0] for seed in range(20)}
    assert leaders == {"idle", "also idle"}
    replicas = {
        "busy": ReplicaLoad(has_model=False, num_models=1),
        "empty": ReplicaLoad(num_ongoing=3, has_model=False),
    }
    assert ranked((), replicas, Random(0))[0] == ["empty"]


def test_every_replica_is_ranked_once_and_the_least_loaded_of_two_leads() -> None:
    replicas = {name: ReplicaLoad(num_ongoing=name) for name in range(5)}
    leaders = set()
    for seed in range(50):
        groups = ranked((), replicas, Random(seed))
        assert sorted(name for group in groups for name in group) == list(range(5))
        assert groups[0] == sorted(groups[0])
        assert len(groups[0]) == 2
        leaders.add(groups[0][0])
    assert leaders == {0, 1, 2, 3}  # the most loaded one never leads


def test_no_replicas_no_choice() -> None:
    assert ranked(LABELS, {}, Random(0)) == []


def test_conversations_stay_with_their_replica_and_load_stays_even() -> None:
    random = Random(1)
    caches: list[set[bytes]] = [set(), set(), set()]
    counts, hits = [0, 0, 0], 0
    turns = [number for number in range(200) for _ in range(3)]
    random.shuffle(turns)
    seen: dict[int, int] = {}
    for conversation in turns:
        turn = seen[conversation] = seen.get(conversation, 0) + 1
        labels = tuple(b"%d-%d" % (conversation, end) for end in range(turn))
        loads = {at: ReplicaLoad(cache) for at, cache in enumerate(caches)}
        chosen = ranked(labels, loads, random)[0][0]
        hits += turn > 1 and matched(labels, loads[chosen]) == turn - 1
        caches[chosen].update(labels)
        counts[chosen] += 1
    assert hits == 400
    assert max(counts) < 1.3 * min(counts)
