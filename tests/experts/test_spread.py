"""Experts over ranks: no rank holds all the hot ones, every rank holds as many, hot ones are on all."""

from __future__ import annotations

import numpy as np
import pytest
from twofold.experts.spread import holders_of_layer


def uses_by_rank(counts: list[int], masks: list[int], num_ranks: int) -> list[float]:
    """Uses that each rank computes if an expert on several is shared evenly."""
    uses = [0.0] * num_ranks
    for count, mask in zip(counts, masks, strict=True):
        for rank in range(num_ranks):
            if mask >> rank & 1:
                uses[rank] += count / mask.bit_count()
    return uses


def test_experts_without_counts_are_dealt_out_by_index() -> None:
    assert holders_of_layer(np.zeros(6, np.int64), 2) == [1, 2, 1, 2, 1, 2]
    assert holders_of_layer(np.zeros(5, np.int64), 3) == [1, 2, 4, 1, 2]


def test_hot_experts_are_on_different_ranks() -> None:
    # The first half of the experts has nearly all uses; dealt out in blocks they would all be on rank 0.
    counts = [90, 80, 70, 60, 1, 1, 1, 1]
    masks = holders_of_layer(np.array(counts), 2)
    assert sorted(uses_by_rank(counts, masks, 2)) == [152, 152]
    assert [masks.count(1), masks.count(2)] == [4, 4]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_popular_experts_of_skewed_routing_are_balanced(num_ranks: int) -> None:
    rng = np.random.default_rng(3)
    counts = rng.zipf(1.6, 128).clip(max=400)
    masks = holders_of_layer(counts, num_ranks)
    held = [sum(mask == 1 << rank for mask in masks) for rank in range(num_ranks)]
    assert max(held) - min(held) <= num_ranks
    assert max(held) <= -(-128 // num_ranks)
    uses = uses_by_rank(counts.tolist(), masks, num_ranks)
    # The rank of the hottest expert gets its number of rarely used ones too.
    assert max(uses) <= max(1.05 * counts.sum() / num_ranks, counts.max() + max(held))


def test_an_expert_with_half_of_all_uses_is_replicated() -> None:
    counts = [100, 20, 20, 20, 20, 20]
    alone = uses_by_rank(counts, holders_of_layer(np.array(counts), 2), 2)
    shared = uses_by_rank(counts, holders_of_layer(np.array(counts), 2, num_redundant=1), 2)
    assert max(shared) == 110 < max(alone) + 1
    assert holders_of_layer(np.array(counts), 2, num_redundant=1)[0] == 0b11
