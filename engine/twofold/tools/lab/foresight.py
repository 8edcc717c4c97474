"""Expert prefetch with experts of Qwen3-30B-A3B's size: the engine's scheduler alone, on synthetic routing.

Each expert stays for the next token with probability STICKY, and the look-ahead router predicts each expert of the next
layer with probability FORESEEN. Tests that the prefetcher stays idle where an upload takes longer than a layer.
`lab.replay` and `lab.simulate` replay real routing, without prediction.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.experts.profiles import load_profile
from twofold.tools.lab.shapes import SHAPES, ModelShape

SHAPE: Final = SHAPES["qwen3-30b-a3b"]
NUM_LAYERS, NUM_EXPERTS, TOP_K = 48, 128, 8
STICKY, FORESEEN = 0.5, 0.75
WARM_UP_STEPS: Final = 50


def sticky_routing(random: np.random.Generator, num_steps: int) -> npt.NDArray[np.int32]:
    """ids [steps, layers, top-k]."""
    ids = np.empty((num_steps, NUM_LAYERS, TOP_K), np.int32)
    for layer in range(NUM_LAYERS):
        now = random.permutation(NUM_EXPERTS)[:TOP_K]
        for step in range(num_steps):
            kept = now[random.random(TOP_K) < STICKY]
            others = np.setdiff1d(np.arange(NUM_EXPERTS), kept)
            now = np.concatenate([kept, random.permutation(others)[: TOP_K - len(kept)]])
            ids[step, layer] = now
    return ids


def played_scheduler(shape: ModelShape, machine: str, slots: float, *, prefetch: bool) -> Any:
    """The core's LayerScheduler of an emulated machine, on a virtual clock. slots: share of all experts.

    Raises ConfigError for an unknown machine.
    """
    cost = shape.cost_model(load_profile(machine))
    num_layers, num_experts, top_k = shape.routing
    num_slots = round(slots * num_layers * num_experts)
    return _core.LayerScheduler(
        cost,
        _core.SchedulerConfig(num_layers, num_experts, top_k, num_slots, prefetch=prefetch),
        _core.Timeline(cost.upload_us()),
    )


def play_sticky(machine: str, slots: float, *, prefetch: bool, num_steps: int = 100) -> tuple[float, Any]:
    """(decode tokens/s by the virtual clock after the warm-up, the counts of prefetching since the start).

    Routing and predictions are the same for all arguments. slots: share of all experts. Raises ConfigError for an
    unknown machine.
    """
    random = np.random.default_rng(0)
    ids = sticky_routing(random, WARM_UP_STEPS + num_steps)
    profile = load_profile(machine)
    dense_us = SHAPE.dense_us(profile, NUM_LAYERS)
    router_us = 2e-3 * SHAPE.hidden * NUM_EXPERTS / profile.cost_figures["vram_bandwidth_gbps"]
    scheduler = played_scheduler(SHAPE, machine, slots, prefetch=prefetch)
    began_us = 0.0
    for step, layers in enumerate(ids):
        if step == WARM_UP_STEPS:
            began_us = scheduler.now_us
        scheduler.begin_step()
        for layer, routed in enumerate(layers):
            scheduler.advance(dense_us[layer])
            if layer + 1 < NUM_LAYERS:
                logits = random.normal(0, 0.1, NUM_EXPERTS).astype(np.float32)
                right = random.random(TOP_K) < FORESEEN
                logits[np.where(right, layers[layer + 1], random.integers(NUM_EXPERTS, size=TOP_K))] += 2
                if prefetch:
                    scheduler.advance(router_us)
                    scheduler.predict(layer + 1, logits[None])
            scheduler.decide(layer, routed[None])
        scheduler.advance(dense_us[-1])
    return num_steps / (scheduler.now_us - began_us) * 1e6, scheduler.counts()["prefetch"]
