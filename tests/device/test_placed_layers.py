"""Layers that the host places, on a fake device: both sides' shares add up to what the CPU alone computes."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from twofold import _core
from twofold.api.errors import ConfigError, KernelError
from twofold.blocks import ops
from twofold.device.placed_layers import PlacedLayers
from twofold.device.placed_share import DECODE_TOKENS, Parcel
from twofold.experts.slot_plan import MoeShape
from twofold.weights.weight_format import (
    formats_by_expert,
    layer_formats,
    packed_expert_bytes,
)

from tests.device.fake_device import FakeDevice
from tests.device.placed_layers import (
    EXPERTS,
    FIGURES,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    MANY,
    TOP_K,
    alone,
    formats_of,
    make_store,
    run_step,
    steps,
)


@pytest.fixture(scope="module")
def pool() -> ops.ThreadPool:
    return ops.ThreadPool(2)


class Noted:
    """A native device or an accelerator that notes what is called on it."""

    def __init__(self, target: Any, calls: list[str]) -> None:
        self._target, self._calls = target, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            self._calls.append(name)
            return found(*args)

        return call


def placed(
    fake: ModuleType,
    pool: ops.ThreadPool,
    store: _core.ExpertStore,
    formats: list[str],
    num_slots: int,
    **device: object,
) -> SimpleNamespace:
    cost = _core.CostModel(
        _core.MachineProfile.from_fields("fake", FIGURES), store.expert_bytes, store.flops_per_token, ()
    )
    opened = fake.open_device(**device)
    accelerator = opened.accelerator(store, cost, _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, num_slots))
    executor = _core.MoeExecutor.on_device(pool, store, accelerator, num_slots == LAYERS * EXPERTS)
    shape = MoeShape(LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, tuple(map(formats_of, formats)))
    calls: list[str] = []
    layers = PlacedLayers([FakeDevice(Noted(opened, calls))], Noted(accelerator, calls), executor, shape)
    return SimpleNamespace(layers=layers, executor=executor, calls=calls)


@pytest.mark.parametrize("num_slots", [0, 7, LAYERS * EXPERTS])
@pytest.mark.parametrize(
    "formats",
    [
        ["f32"] * 3,
        ["bf16"] * 3,
        ["q8_0"] * 3,
        ["q4_0"] * 3,
        ["f32", "q8_0", "bf16"],
        ["bf16+q4_0+q8_0", "q8_0+f32", "q4_0"],
    ],
    ids="-".join,
)
def test_both_sides_add_up_to_what_the_cpu_computes(
    fake: ModuleType, pool: ops.ThreadPool, formats: list[str], num_slots: int
) -> None:
    store = make_store(pool, formats)
    device = placed(fake, pool, store, formats, num_slots, most_delay_us=20.0)
    device.executor.events_enabled = True
    played = steps(16 if num_slots == 7 else 8, (1, 5, 2, DECODE_TOKENS, 1, DECODE_TOKENS + 1, 3, MANY))
    for number, layers in enumerate(played):
        hidden, expected = run_step(device, number, layers), alone(pool, store, number, layers)
        tolerance = 1e-5 if formats == ["f32"] * 3 else 0.02
        assert (hidden - expected).norm() < tolerance * expected.norm()
    counts = device.executor.counts()
    if num_slots == LAYERS * EXPERTS:
        assert counts["cpu_misses"] == counts["fetched"] == 0
    elif num_slots:
        assert min(counts["hits"], counts["cpu_misses"], counts["fetched"]) > 0
    else:
        assert min(counts["cpu_misses"], counts["fetched"]) > 0
    assert ("prefill_experts" in device.calls) == (formats != ["f32"] * 3)
    assert "decode_experts" in device.calls
    events = device.executor.drain_events()
    rows, uploads = events["token_layer"], events["upload"]
    for upload in uploads:
        own = formats_by_expert(formats_of(formats[upload["layer"]]), EXPERTS)[upload["expert"]]
        assert upload["size_bytes"] == packed_expert_bytes(own, HIDDEN, INTERMEDIATE)
    assert len(rows) == sum(len(layers[0][0]) for layers in played) * LAYERS
    assert (rows["layer_us"] > 0).all()


def test_residents_are_launched_before_anything_waits_for_an_upload(
    fake: ModuleType, pool: ops.ThreadPool
) -> None:
    formats = ["bf16"] * LAYERS
    device = placed(fake, pool, make_store(pool, formats), formats, 7)
    orders = set()
    for number, layers in enumerate(steps(12, (4, 33))):
        del device.calls[:]
        run_step(device, number, layers)
        launches = [name for name in device.calls if name not in ("encode", "tile_tokens_for", "tile_groups")]
        for begin in [i for i, name in enumerate(launches) if name == "read_host"]:
            end = launches.index("combine", begin)
            orders.add(tuple(launches[begin : end + 1]))
    kernels = ("decode_experts", "prefill_experts")
    wanted = {
        ("read_host", *hits, "before_compute", *fetched, "after_compute", "combine")
        for kernel in kernels
        for hits in ((), (kernel,))
        for fetched in ((), (kernel,))
    }
    assert orders <= wanted
    for kernel in kernels:
        assert ("read_host", kernel, "before_compute", kernel, "after_compute", "combine") in orders


def test_a_fetched_expert_whose_upload_fails_on_its_way_costs_the_step(
    fake: ModuleType, pool: ops.ThreadPool
) -> None:
    formats = ["f32"] * LAYERS
    store = make_store(pool, formats)
    device = placed(fake, pool, store, formats, 7, fail_completion=0.05)
    complaints = []
    for number, layers in enumerate(steps(16, (4, 12))):
        try:
            hidden = run_step(device, number, layers)
        except KernelError as error:
            complaints.append(str(error))
            continue
        assert torch.allclose(hidden, alone(pool, store, number, layers), atol=1e-4)
    assert 0 < len(complaints) < 16
    assert all("an upload that a layer waits for failed" in complaint for complaint in complaints)


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (("q8_0", "q4_0", "q8_0"), "gate in q8_0 and up in q4_0"),
        (("q4_0", "q4_0", "bf16"), "q4_0 and down in bf16"),
    ],
)
def test_an_expert_without_kernels_is_refused(formats: tuple[str, str, str], message: str) -> None:
    """Also a single one among others."""
    mixed = layer_formats([("q8_0",) * 3] * (EXPERTS - 1) + [formats])
    shape = MoeShape(1, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, (mixed,))
    with pytest.raises(ConfigError, match=message):
        PlacedLayers([FakeDevice()], None, None, shape)  # type: ignore[arg-type]


def test_a_parcel_arrives_as_it_was_packed_and_has_its_limit(fake: ModuleType) -> None:
    device = FakeDevice(fake.open_device())
    parcel = Parcel(device, 100)
    for values in (np.arange(7, dtype=np.int32), np.arange(3, dtype=np.int64) - 9, np.empty(0, np.int32)):
        parcel.open()
        parcel.put(np.zeros(3, np.uint8))
        address = parcel.put(values)
        parcel.send(0)
        raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * values.nbytes).from_address(address))
        assert np.array_equal(raw.view(values.dtype), values)
        assert address % 16 == 0
    with pytest.raises(ValueError, match="there is room for 112"):
        parcel.put(np.zeros(200, np.uint8))
    with pytest.raises(KernelError, match="read_host"):
        device.native.read_host(1, 2, 3, 0)
