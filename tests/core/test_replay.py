"""Replay on a toy trace small enough to check by hand, and the trace's validation."""

from __future__ import annotations

import numpy as np
import pytest
from twofold import _core
from twofold import _testing as testing

A, B, C, D = range(4)
# Ten tokens, two layers, four experts, top-1, two slots per layer.
LAYER_0 = [A, B, A, C, A, D, B, B, A, C]
LAYER_1 = [A, A, B, B, C, C, A, D, A, D]


def toy(offsets=(0, 10)) -> _core.RoutingTrace:
    ids = np.array([LAYER_0, LAYER_1], dtype=np.uint16).T[:, :, None]
    return _core.RoutingTrace(ids, None, np.array(offsets), 4)


def cache(policy: str, price: float = 0.67, slots: int = 2, **kwargs) -> testing.ExpertCache:
    return testing.ExpertCache(testing.CacheConfig(2, 4, 1, [slots] * 2, policy, price, **kwargs))


def story(policy: str, **kwargs) -> dict[int, list[str]]:
    """Per layer, one word per token: "hit", "miss" (stays on the CPU), "up" (into a free slot), "up-X" (evicting X)."""
    _, decisions = testing.replay_decisions(toy(), 1, cache(policy, **kwargs))
    words: dict[int, list[str]] = {0: [], 1: []}
    for d in decisions:
        if d.hit:
            word = "hit"
        elif not d.uploaded:
            word = "miss"
        else:
            word = "up" if d.evicted < 0 else f"up-{'ABCD'[d.evicted]}"
        words[d.layer].append(word)
    return words


def test_lru_by_hand():
    assert story("lru") == {
        # A    B     A      C: B is older   A      D: C is older   B: A (token 4) is older than D (5)
        0: [
            "up",
            "up",
            "hit",
            "up-B",
            "hit",
            "up-C",
            "up-A",
            # B     A: D older   C: B (7) is older than A (8)
            "hit",
            "up-D",
            "up-B",
        ],
        # A    A      B     B      C: A is older   C      A: B older   D: C older   A      D
        1: ["up", "hit", "up", "hit", "up-A", "hit", "up-B", "up-C", "hit", "hit"],
    }


def test_two_in_eight_by_hand():
    assert story("two-in-eight") == {
        # A and B once: no. A again after 2: yes. C, D once. B again after 5: yes. C again after 6: out goes B (7),
        # for A is at 8.
        0: ["miss", "miss", "up", "miss", "hit", "miss", "up", "hit", "hit", "up-B"],
        # Each at its second use; C puts out A (1), A (second use 5 ago) puts out B (3), D puts out C (5).
        1: ["miss", "up", "miss", "up", "miss", "up-A", "up-B", "miss", "hit", "up-C"],
    }


def test_belady_by_hand():
    assert story("belady") == {
        # C (next at 9) is later than A (4) and B (6): not taken in. D never comes again. At 9 C never comes again.
        0: ["up", "up", "hit", "miss", "hit", "miss", "hit", "hit", "hit", "miss"],
        # C (next at 5) puts out B, which never comes again; D (9) puts out C.
        1: ["up", "hit", "up", "hit", "up-B", "hit", "hit", "up-C", "hit", "hit"],
    }


def test_lfu_by_hand():
    assert story("lfu") == {
        # Counts at token 3: A 2, B 1 -> C puts out B. D puts out C (1). B (2 uses) puts out D (1). C (2) puts out B
        # (3), for A has 4.
        0: ["up", "up", "hit", "up-B", "hit", "up-C", "up-D", "hit", "hit", "up-B"],
        # C at 4: A and B have 2 each, the lower number (A) goes. A at 6: B 2, C 2: B goes.
        # D at 7: A 3, C 2: C goes.
        1: ["up", "hit", "up", "hit", "up-A", "hit", "up-B", "up-C", "hit", "hit"],
    }


def test_frequency_lru_by_hand():
    # A class is floor(log2(1 + uses)), and uses fade.
    assert story("frequency-lru") == {
        # Token 3: A 1.98 and B 0.99 are both of class 1 (A) and 0 (B): B leaves. So does C, B and C again.
        0: ["up", "up", "hit", "up-B", "hit", "up-C", "up-D", "hit", "hit", "up-B"],
        # 4: A and B are of class 1, A is older. At 6 B and C are, B is older. At 7 C leaves for D
        # (older than A).
        1: ["up", "hit", "up", "hit", "up-A", "hit", "up-B", "up-C", "hit", "hit"],
    }


def test_half_lru_admits_half_of_the_misses():
    ids = np.arange(8000, dtype=np.uint16)[:, None, None] % 40
    c = testing.ExpertCache(testing.CacheConfig(1, 40, 1, [4], "half-lru", 0.67))
    counts, _ = testing.replay_decisions(_core.RoutingTrace(ids, None, np.array([0, 8000]), 40), 1, c)
    assert counts.num_uploads == pytest.approx(counts.num_misses / 2, rel=0.05)


def test_pinned_lru_keeps_what_was_used_most():
    # Four slots in one pool, two of them for good: A of layer 0 and C of layer 1.
    counts, decisions = testing.replay_decisions(
        toy(), 1, cache("pinned-lru", prior_usage=[5, 0, 0, 0, 0, 0, 4, 0])
    )
    after_use = [(d.layer, d.expert, d.hit) for d in decisions if (d.layer, d.expert) in ((0, A), (1, C))]
    assert [hit for layer, _, hit in after_use if layer == 0] == [False] + [True] * (LAYER_0.count(A) - 1)
    assert [hit for layer, _, hit in after_use if layer == 1] == [False] + [True] * (LAYER_1.count(C) - 1)
    assert counts.num_misses > 2
    assert story("pinned-lru") == story("lru", shared_pool=True), "nothing is known, nothing pinned"


def test_static_by_hand():
    # Filled at start with what the prior says: A and C in layer 0, D and B in layer 1.
    c = cache("static", prior_usage=[5, 0, 3, 0, 0, 1, 0, 2])
    c.preload_by_usage()
    counts, _ = testing.replay_decisions(toy(), 1, c)
    assert (counts.num_hits, counts.num_misses, counts.num_uploads) == (6 + 4, 4 + 6, 0)


def test_oracle_payback_by_hand():
    # Price 0.67: an upload must bring more than two thirds of a (discounted) use beyond its victim's.
    words = story("oracle-payback")
    # Layer 0: A (2, 4, 8) and B (6, 7) pay; C (9: 0.98^6 = 0.89 at token 3) does not beat B (0.98^3 + 0.98^4); the last
    # uses never pay.
    assert words[0] == ["up", "up", "hit", "miss", "hit", "miss", "hit", "hit", "hit", "miss"]
    # Layer 1: B's only later use (0.98) pays; C (0.98) replaces B (0); D at 7 (0.98^2) replaces C (0).
    assert words[1] == ["up", "hit", "up", "hit", "up-B", "hit", "hit", "up-C", "hit", "hit"]


def test_counts_match_the_planned_events():
    counts = testing.replay_decisions(toy(), 1, cache("lru"))[0]
    assert (counts.num_steps, counts.num_tokens, counts.num_events) == (10, 10, 20)
    assert (counts.num_hits, counts.num_misses, counts.num_uploads, counts.num_evictions) == (
        3 + 5,
        7 + 5,
        12,
        8,
    )


def test_batch_plays_sequences_side_by_side():
    trace = toy(offsets=(0, 4, 6, 10))
    # Lanes of two: (0, 4), (1, 5), (2, 6), (3, 7), then the second lane goes on alone: 8, 9.
    assert list(testing.future_of(trace, 2)[0]) == [[A], [B, D], [A, B], [B, C], [A], [C]]
    counts = testing.replay_decisions(trace, 2, cache("lru"))[0]
    assert (counts.num_steps, counts.num_tokens) == (6, 10)


@pytest.mark.parametrize("policy", [policy.name for policy in _core.cache_policies()])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_policy_plays_every_token(policy, batch):
    rng = np.random.default_rng(0)
    ids = np.array(
        [[rng.choice(16, 4, replace=False) for _ in range(3)] for _ in range(120)], dtype=np.uint16
    )
    trace = _core.RoutingTrace(ids, None, np.array([0, 50, 70, 120]), 16)
    c = testing.ExpertCache(testing.CacheConfig(3, 16, 4, [6] * 3, policy, 0.67))
    counts = testing.replay_decisions(trace, batch, c)[0]
    assert counts.num_tokens == 120
    assert counts.num_evictions <= counts.num_uploads <= counts.num_misses
    active = sum(len(e) for layer in testing.future_of(trace, batch) for e in layer)
    assert counts.num_hits + counts.num_misses == active


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.zeros((3, 2), np.uint16)}, r"\[tokens, layers, top_k\] expected"),
        ({"num_experts": 3}, "expert 3 at token 5, layer 0 given, 0 ... 2 expected"),
        ({"offsets": np.array([0, 9])}, "offsets must rise from 0 to the number of tokens"),
        ({"offsets": np.array([0, 7, 5, 10])}, "offsets must rise"),
        ({"weights": np.zeros((10, 2, 2), np.float32)}, "40 gate weights given"),
        ({"ids": np.full((10, 1, 2), 1, np.uint16)}, "expert 1 routed twice at token 0, layer 0"),
    ],
)
def test_bad_traces_are_named(change, message):
    ids = np.array([LAYER_0, LAYER_1], dtype=np.uint16).T[:, :, None]
    given = {"ids": ids, "weights": None, "offsets": np.array([0, 10]), "num_experts": 4} | change
    with pytest.raises(ValueError, match=message):
        _core.RoutingTrace(**given)
