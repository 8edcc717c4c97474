"""Two fake devices in one machine: the same sums and answers as on one, experts on both, failures of either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.control import Resize
from twofold.api.errors import ConfigError, KernelError
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.device.finding import cuda_indices
from twofold.device.memory.budget import DeviceBudget, DeviceMemory
from twofold.device.memory.needs import DeviceNeeds, LayerNeeds
from twofold.device.memory.pipeline import plan_pipeline
from twofold.device.placed_layers import PlacedLayers
from twofold.engine import Engine
from twofold.experts.profiles import Figure, load_profile
from twofold.experts.slot_plan import MoeShape
from twofold.tools.cli.doctor.machine_checks import check_accelerator, check_device_memory

from tests.device.fake_device import FakeDevice
from tests.device.placed_layers import (
    EXPERTS,
    FIGURES,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    TOP_K,
    alone,
    formats_of,
    make_store,
    run_step,
    steps,
)
from tests.device.runner_runs import make_runner, scripted, two_devices
from tests.tiny_models.writing import TinyModel, write_tiny_model

TINY = TinyModel(dtype="bfloat16", hidden_size=64, head_dim=64, num_layers=3, num_experts=10)
ROOM = 2 << 30
SIZES = (1, 5, 33, 2, 40, 1, 32)


@pytest.fixture(scope="module")
def pool() -> ops.ThreadPool:
    return ops.ThreadPool(2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), TINY)


def machine(
    fake: ModuleType,
    pool: ops.ThreadPool,
    store: _core.ExpertStore,
    formats: list[str],
    slots: tuple[int, ...],
    *failing: dict[str, Any],
    moves: bool = True,
    homes: tuple[int, ...] = (),
) -> SimpleNamespace:
    """Layers and executor over one device for each entry of `slots`; failing: settings of the devices."""
    first, *others = [_core.MachineProfile.from_fields("fake", FIGURES)] * len(slots)
    cost = _core.CostModel(first.with_devices(others), store.expert_bytes, store.flops_per_token, ())
    opened: list[Any] = []
    for number in range(len(slots)):
        settings = failing[number] if failing else {}
        beside = {"beside": opened[0]} if opened else {"tick_us": 2.0}
        opened.append(fake.open_device(number, **beside, **settings))
    config = _core.SchedulerConfig(LAYERS, EXPERTS, TOP_K, slots, background_uploads=moves, homes=homes)
    accelerator = opened[0].accelerator(store, cost, config, opened[1:])
    everything = sum(slots) == LAYERS * EXPERTS
    executor = _core.MoeExecutor.on_device(pool, store, accelerator, everything)
    executor.events_enabled = True
    shape = MoeShape(LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, tuple(map(formats_of, formats)))
    layers = PlacedLayers([FakeDevice(each) for each in opened], accelerator, executor, shape, homes=homes)
    return SimpleNamespace(layers=layers, executor=executor, accelerator=accelerator)


@pytest.mark.parametrize("name", ["f32", "bf16", "q8_0", "q4_0", "bf16+q4_0"])
@pytest.mark.parametrize(
    ("slots", "homes"),
    [((12, 12), ()), ((6, 18), ()), ((8, 9, 7), ()), ((12, 12), (0, 1, 1)), ((8, 9, 7), (0, 1, 2))],
)
def test_sums_have_the_bits_of_one_device(
    fake: ModuleType, pool: ops.ThreadPool, name: str, slots: tuple[int, ...], homes: tuple[int, ...]
) -> None:
    """All experts are in slots, so that all are computed by the same kernels."""
    formats = [name] * LAYERS
    store = make_store(pool, formats)
    several = machine(fake, pool, store, formats, slots, moves=False, homes=homes)
    one = machine(fake, pool, store, formats, (LAYERS * EXPERTS,), moves=False)
    for number, layers in enumerate(steps(7, SIZES)):
        assert torch.equal(run_step(several, number, layers), run_step(one, number, layers))
    held = several.executor.placement_devices()
    assert [int((held == device).sum()) for device in range(len(slots))] == list(slots)
    assert several.executor.counts()["cpu_misses"] == 0


@pytest.mark.parametrize("slots", [(4, 3), (0, 7), (7, 0), (2, 2, 3)])
def test_devices_and_cpu_add_up_to_what_the_cpu_computes(
    fake: ModuleType, pool: ops.ThreadPool, slots: tuple[int, ...]
) -> None:
    formats = ["f32", "q8_0+q4_0", "bf16"]
    store = make_store(pool, formats)
    several = machine(fake, pool, store, formats, slots)
    for number, layers in enumerate(steps(21, SIZES)):
        hidden, expected = run_step(several, number, layers), alone(pool, store, number, layers)
        assert (hidden - expected).norm() < 0.02 * expected.norm()
    several.executor.idle()
    counts = several.executor.counts()
    assert min(counts["hits"], counts["cpu_misses"] + counts["fetched"]) > 0
    landed = [fake.upload_counts(several.accelerator, device)["landed"] for device in range(len(slots))]
    assert sum(landed) == counts["uploads"]
    uploads = several.executor.drain_events()["upload"]
    assert (uploads["begin_us"] < uploads["end_us"]).all()
    assert np.bincount(uploads["device"], minlength=len(slots)).tolist() == landed


@pytest.mark.parametrize("broken", [0, 1])
def test_uploads_to_a_broken_device_cost_time_or_the_step_and_no_bits(
    fake: ModuleType, pool: ops.ThreadPool, broken: int
) -> None:
    formats = ["f32"] * LAYERS
    store = make_store(pool, formats)
    for failure in ({"fail_issue": 0.3}, {"fail_completion": 0.05}):
        settings: list[dict[str, Any]] = [{}, {}]
        settings[broken] = failure
        several = machine(fake, pool, store, formats, (4, 3), *settings)
        complaints = []
        for number, layers in enumerate(steps(21, SIZES)):
            try:
                hidden = run_step(several, number, layers)
            except KernelError as error:
                complaints.append(str(error))
                continue
            assert torch.allclose(hidden, alone(pool, store, number, layers), atol=1e-4)
        assert all("an upload that a layer waits for failed" in complaint for complaint in complaints)
        assert len(complaints) < 21
        counts = [fake.upload_counts(several.accelerator, device)["failed"] for device in (0, 1)]
        assert counts[1 - broken] == 0


def test_each_link_is_corrected_by_its_own_copies(fake: ModuleType, pool: ops.ThreadPool) -> None:
    """The second device's link is ten times slower than its figures say."""
    formats = ["f32"] * LAYERS
    store = make_store(pool, formats)
    several = machine(fake, pool, store, formats, (4, 4), {"bandwidth_gbps": 1.0}, {"bandwidth_gbps": 0.1})
    for number, layers in enumerate(steps(60, (1, 5))):
        run_step(several, number, layers)
    first, second = (fake.link_correction(several.accelerator, device) for device in (0, 1))
    assert second > 2 * first


@pytest.fixture(scope="module")
def slow_cpu(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A machine whose CPU computes no expert that is in a slot: its part of a sum would round differently."""
    machine = load_profile("h200-pcie5")
    figures = {**machine.figures, "cpu_expert_overhead_us": Figure(1e5, "a test")}
    path = tmp_path_factory.mktemp("machine") / "slow.json"
    path.write_text(replace(machine, figures=figures).to_json(), encoding="utf-8")
    return str(path)


def test_steps_that_the_host_places_prefetch(fake: ModuleType, tiny: Path) -> None:
    """Each layer's router looks ahead for the next one; a foreseen expert comes to one of the devices."""
    runner = make_runner(fake, tiny, slots=9, prefetch="on", others=[{}], tensor_split=(0.5, 0.5))
    scripted(runner, 3, 9, runner.vocab_size)
    counts = runner.moe.scheduler_counts()["prefetch"]
    assert counts["predicted"] > 0
    assert counts["correct"] > 0.5 * counts["predicted"]


@pytest.mark.parametrize("homes", [(), (0, 1, 1), (1, 1, 1)])
def test_a_runner_on_two_devices_answers_as_on_one(
    fake: ModuleType, tiny: Path, homes: tuple[int, ...], slow_cpu: str
) -> None:
    """All experts in slots: equal logits, bit by bit, wherever the dense layers are."""
    slots = TINY.num_layers * TINY.num_experts
    one = make_runner(fake, tiny, slots=slots, table_steps=False, machine=slow_cpu)
    two = make_runner(
        fake, tiny, slots=slots, others=[{}], tensor_split=(0.4, 0.6), homes=homes, machine=slow_cpu
    )
    vocabulary = one.vocab_size
    assert np.array_equal(scripted(two, 3, 9, vocabulary), scripted(one, 3, 9, vocabulary))
    assert two.why_placed == "several devices share the experts"
    assert (two.num_table_steps, two.why_eager) == (0, None)
    held = two.moe.executor.placement_devices()
    assert held is not None
    # An expert comes to its slot when it is first used; 12 and 18 slots are there.
    held_by = [int((held == device).sum()) for device in (0, 1)]
    assert all(0 < count <= slots for count, slots in zip(held_by, (12, 18), strict=True))
    assert sum(held_by) > 20
    assert two.moe.counts().cpu_misses == 0


GIB = 2**30
NEEDS = DeviceNeeds(
    dense_bytes=(2 + 48 * 1) * GIB // 8,
    kv_bytes_per_token=48 * 2048,
    one_expert_bytes=10_000_000,
    num_layers=48,
    num_experts=128,
    top_k=8,
    max_context=32_768,
    layers=tuple(LayerNeeds(GIB // 8, 2048, 0, True, n - n % 2) for n in range(48)),
)


def planned(config: EngineConfig, *gib: int) -> DeviceBudget:
    profile = load_profile("rtx4090-pcie4+rtx4090-pcie4").native()
    cost = _core.CostModel(profile, NEEDS.one_expert_bytes, 2e7)
    return plan_pipeline(config, NEEDS, [DeviceMemory(each * GIB, each * GIB) for each in gib], (), cost)


def test_dense_layers_are_divided_where_one_device_has_no_room() -> None:
    """6.25 GiB of dense weights; layers of a pair share their state, so they stay together."""
    config = EngineConfig(model="m", max_total_tokens=16_384)
    roomy = planned(config, 24, 24)
    assert roomy.homes == () or roomy.homes[0] == 0
    tight = planned(config, 6, 24)
    counts = [tight.homes.count(device) for device in (0, 1)]
    assert sum(counts) == 48
    assert counts[1] > 0
    assert tight.homes == (0,) * counts[0] + (1,) * counts[1]
    assert counts[0] % 2 == 0
    first, second = tight.gpus
    assert first.used_bytes <= first.limit_bytes
    assert second.used_bytes <= second.limit_bytes
    assert first.dense_bytes + second.dense_bytes == NEEDS.dense_bytes
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        planned(config, 3, 3)


def test_more_tokens_than_one_device_can_keep_are_divided() -> None:
    """64 Ki tokens take 6 GiB: too much beside the dense weights of one device of 12 GiB."""
    budget = planned(EngineConfig(model="m", max_total_tokens=65_536), 12, 12)
    assert budget.num_kv_tokens == 65_536
    assert 0 < budget.homes.count(1) < 48


def answer(tiny: Path, tokens: int = 12, **settings: Any) -> tuple[list[int], Engine]:
    engine = Engine.load(EngineConfig(model=str(tiny), cpu_threads=1, max_total_tokens=512, **settings))
    answered: list[int] = []
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    engine.generate(tuple(range(5, 45)), sampling, lambda chunk: answered.extend(chunk.token_ids))
    return answered, engine


@pytest.mark.parametrize("settings", [{}, {"tensor_split": "1,3"}, {"policy": "lru"}, {"main_gpu": 1}])
def test_an_engine_on_two_devices_answers_as_on_one(
    simt: ModuleType, tiny: Path, settings: dict[str, Any]
) -> None:
    with two_devices(simt, ROOM, ROOM):
        expected, one = answer(tiny, devices="cuda:0", gpu_experts_ratio=1.0)
        one.close()
        tokens, two = answer(tiny, devices="cuda:0,cuda:1", gpu_experts_ratio=1.0, **settings)
        assert tokens == expected
        assert two.info.accelerator == ("cuda:1+cuda:0" if "main_gpu" in settings else "cuda:0+cuda:1")
        assert two.info.num_slots == TINY.num_layers * TINY.num_experts
        assert "; GPU 2: " in two.info.accelerator_reason
        two.close()


def test_two_devices_with_few_slots_move_experts_and_resize(fake: ModuleType, tiny: Path) -> None:
    with two_devices(fake, ROOM, ROOM):
        tokens, engine = answer(tiny, 24, devices="cuda:0,CUDA1", gpu_experts_ratio=0.5)
        assert len(tokens) == 24
        counts = engine.stats().placement
        assert min(counts.hits, counts.cpu_misses, counts.uploads) > 0
        engine.start()
        placed = engine.control.expert_placement()
        assert placed.devices == ("cuda:0", "cuda:1")
        assert {device for layer in placed.held_by for device in layer} == {0, 1}
        smaller = engine.control.resize(Resize(gpu_experts_ratio=0.2))
        assert smaller.num_slots == 6
        engine.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"devices": "cuda:0,cuda:2"}, "--devices cuda:2: there is no such device, only cuda:0, cuda:1"),
        (
            {"devices": "cuda:0,cuda:1", "tensor_split": "1"},
            "--tensor-split 1 has 1 shares; the machine has 2",
        ),
        ({"devices": "cuda:0", "tensor_split": "1,1"}, "--tensor-split 1,1 was given with one device"),
        (
            {"devices": "cuda:0,cuda:1", "machine_profile": "h200-pcie5+h200-pcie5+h200-pcie5"},
            "has 3 devices; 2 are used",
        ),
    ],
)
def test_an_unsatisfiable_setting_is_refused_in_one_line(
    fake: ModuleType, tiny: Path, settings: dict[str, Any], says: str
) -> None:
    with two_devices(fake, ROOM, ROOM), pytest.raises(ConfigError) as refused:
        answer(tiny, **settings)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"devices": "cuda:0,cuda:0"}, "each of them once"),
        ({"devices": "cuda:0,rocm:1"}, "expected GPUs such as cuda:0,cuda:1"),
        ({"devices": "cuda:0", "accelerator": "none"}, "--accelerator none; leave one of them out"),
        (
            {"devices": "cuda:0", "main_gpu": 1},
            "--main-gpu was given 1; --devices cuda:0 has 1, counted from 0",
        ),
        ({"main_gpu": 1}, "--main-gpu was given without --devices"),
        ({"split_mode": "none"}, "--split-mode none was given without --devices"),
        (
            {"main_gpu": 1, "accelerator": "emulated:rtx4090-pcie4+rtx3060-pcie4"},
            "--main-gpu was given with --accelerator emulated:rtx4090-pcie4+rtx3060-pcie4, whose first card",
        ),
        ({"devices": "cuda:0,cuda:1", "split_mode": "row"}, "--split-mode"),
    ],
)
def test_settings_that_do_not_name_devices_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cuda_indices(EngineConfig(model="m", **settings))
    assert says in str(refused.value)


def test_the_main_device_comes_first_or_is_used_alone() -> None:
    def chosen(**settings: Any) -> tuple[int, ...]:
        return cuda_indices(EngineConfig(model="m", devices="cuda:2,cuda:0,cuda:1", **settings))

    assert cuda_indices(EngineConfig(model="m")) == ()
    assert chosen() == (2, 0, 1)
    assert chosen(main_gpu=1) == (0, 2, 1)
    assert chosen(main_gpu=1, split_mode="none") == (0,)


def test_doctor_shows_the_split_of_each_device(fake: ModuleType, tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), devices="cuda:0,cuda:1", gpu_experts_ratio=0.5)
    with two_devices(fake, ROOM, ROOM):
        memory, accelerator = check_device_memory(config), check_accelerator(config)
    assert memory is not None
    assert (memory.verdict, accelerator.verdict) == ("ok", "ok")
    assert "; GPU 2: " in memory.found
    assert accelerator.found == "cuda:0+cuda:1: asked for: cuda:0, cuda:1"
