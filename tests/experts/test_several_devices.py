"""The MoE executor on emulated machines of several devices: equal outputs, slots of every device, saved caches."""

from __future__ import annotations

import numpy as np
import pytest
from twofold import _core
from twofold.blocks import ops
from twofold.experts.profiles import load_profile

from tests.experts.random_experts import EXPERTS, LAYERS, POLICIES, TOP_K, Model, batch, run


@pytest.fixture(scope="module")
def pool():
    return ops.ThreadPool(2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [(6, 5), (2, 0, 9), (12, 12)])
def test_bit_identical_on_several_devices(pool, policy, slots):
    model = Model("bfloat16")
    plain = _core.MoeExecutor(pool, model.store)
    # Experts of a few KB: only a slow CPU and slow links leave work to every device.
    slow = {"cpu_bandwidth_gbps": 1e-3, "link_bandwidth_gbps": 2e-3, "vram_bandwidth_gbps": 0.1}
    names = ["rtx4090-pcie4", "rtx3060-pcie3", "rtx3060-pcie3"][: len(slots)]
    first, *others = (
        _core.MachineProfile.from_fields(name, load_profile(name).cost_figures | slow) for name in names
    )
    several = _core.MoeExecutor.emulated(
        pool,
        model.store,
        cost=_core.CostModel(
            first.with_devices(others), model.store.expert_bytes, model.store.flops_per_token
        ),
        config=_core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, slots, policy),
        dense=_core.DenseCost(bytes=[1e6] * (LAYERS + 1), flops_per_token=[1e6] * (LAYERS + 1)),
        preload=False,
    )
    assert several.num_slots == sum(slots)
    for step in range(25):
        arrays = batch(num_tokens=(1, 1, 4, 1, 30)[step % 5], seed=step)
        for layer in range(LAYERS):
            assert np.array_equal(run(plain, layer, arrays, step), run(several, layer, arrays, step))
    several.idle()
    devices = several.placement_devices()
    states, _ = several.placement()
    assert np.array_equal(devices >= 0, states == 2)
    held = [int((devices == d).sum()) for d in range(len(slots))]
    assert all(count <= room for count, room in zip(held, slots, strict=True))
    assert sum(count > 0 for count in held) == sum(room > 0 for room in slots) or policy == "static"
    # Every slot number of an event is one of a device or of its staging room.
    uploads = several.drain_events()["upload"]
    assert uploads["slot"].max() < sum(slots) + len(slots) * EXPERTS
    wanted = np.zeros((LAYERS, EXPERTS), np.uint8)
    wanted[:, : sum(room // LAYERS for room in slots)] = 1
    several.place_experts(wanted)
    assert np.array_equal(several.placement_devices() >= 0, wanted.astype(bool))


def test_a_saved_cache_fills_several_devices_again(pool, tmp_path):
    model = Model("float32")
    first = _core.MachineProfile.from_fields("m", load_profile("rtx4090-pcie4").cost_figures)

    def executor():
        return _core.MoeExecutor.emulated(
            pool,
            model.store,
            cost=_core.CostModel(first.with_devices([first]), model.store.expert_bytes, 1e4),
            config=_core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, [5, 7]),
            dense=_core.DenseCost(bytes=[1e6] * (LAYERS + 1), flops_per_token=[1e6] * (LAYERS + 1)),
            preload=False,
        )

    used, fresh = executor(), executor()
    wanted = np.zeros((LAYERS, EXPERTS), np.uint8)
    wanted.ravel()[::2] = 1  # twelve experts
    used.place_experts(wanted)
    used.save_cache(str(tmp_path / "cache"))
    assert fresh.restore_cache(str(tmp_path / "cache")) == 12
    assert np.array_equal(fresh.placement_devices() >= 0, wanted.astype(bool))
