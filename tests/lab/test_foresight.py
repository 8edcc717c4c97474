"""Prefetch of larger experts: never worth less than a percent of speed, whatever the machine."""

from __future__ import annotations

import numpy as np
import pytest
from twofold.tools.lab.foresight import NUM_LAYERS, STICKY, TOP_K, play_sticky, sticky_routing


def test_routing_has_the_given_stickiness_and_no_expert_twice():
    ids = sticky_routing(np.random.default_rng(0), 60)
    assert all(len(set(row)) == TOP_K for row in ids.reshape(-1, TOP_K))
    stayed = [
        len(set(ids[step, layer]) & set(ids[step + 1, layer])) / TOP_K
        for step in range(59)
        for layer in range(NUM_LAYERS)
    ]
    assert np.mean(stayed) == pytest.approx(STICKY, abs=0.06)


@pytest.mark.parametrize("machine", ["rtx4090-pcie4", "rtx3060-pcie3"])
def test_prefetching_experts_that_take_longer_than_a_layer_costs_next_to_nothing(machine):
    (off, _), (on, counts) = (
        play_sticky(machine, 0.25, prefetch=prefetch, num_steps=30) for prefetch in (False, True)
    )
    assert on > 0.98 * off
    assert counts["predicted"] > 0
