"""Routed experts in training beside a device: the fake one, whose kernels the SIMT machine runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from twofold import _core
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.training.base import open_base
from twofold.training.device_experts import DeviceExperts, ExpertKind
from twofold.training.device_lane import DeviceLane, totals_line
from twofold.training.enabling import enable
from twofold.training.experts import ExpertLayer
from twofold.training.placing import use_device

from tests.device.conftest import built_module
from tests.device.fake_device import FakeDevice
from tests.engine.model_runs import random_prompt
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model
from tests.training.expert_cases import CASES, EXPERTS, Case, case_of, inputs


@pytest.fixture(scope="module")
def fake() -> ModuleType:
    enable()
    return built_module("twofold_fake")


def cost_of(curve: list[tuple[int, float]]) -> _core.CostModel:
    """Two uploads of an expert take 100 us; the device's products take none."""
    fixed = dict.fromkeys(
        (
            "cpu_expert_overhead_us",
            "handshake_us",
            "gpu_launch_us",
            "link_latency_us",
            "contention",
            "join_us",
        ),
        0.0,
    )
    rates = dict.fromkeys(("cpu_bandwidth_gbps", "cpu_gflops", "vram_bandwidth_gbps", "gpu_gflops"), 1e9)
    figures = fixed | rates | {"link_bandwidth_gbps": 1.0}
    return _core.CostModel(_core.MachineProfile.from_fields("test", figures), 1e5, 1.0, curve)


def run(case: Case, lane: DeviceLane | None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """y, and the gradients of x, the weights and all factors."""
    x, ids, weights, factors, dy = inputs(case)
    x = x.to(dtype)
    leaves = [x, weights, *(each for pair in factors for each in (pair.a, pair.b))]
    for leaf in leaves:
        leaf.requires_grad_()
    layer = ExpertLayer(ops.ThreadPool(2), case.store, 0)
    layer.lane = lane
    y = layer(x, ids, weights, tuple(factors))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


def device_experts(fake: ModuleType, case: Case) -> DeviceExperts:
    device: Any = FakeDevice(fake.open_device())
    kind = ExpertKind(case.activation, case.limit, case.biases is not None)
    return DeviceExperts(device, case.store, [kind], case.sizes, (5.0, 1.0))


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("bf16", "some"),
        ("q4_k beside q6_k", "some"),
        ("gpt-oss", "all"),
        ("limited", "all"),
        ("gelu", "some"),
    ],
)
def test_a_device_computes_what_the_cpu_would(fake: ModuleType, name: str, share: str) -> None:
    case = case_of(**CASES[name])
    slow_cpu = [(1, 1e6), (2, 2e6)] if share == "all" else [(1, 1.0), (80, 80.0), (160, 1e4)]
    lane = DeviceLane(cost_of(slow_cpu), EXPERTS, device_experts(fake, case))
    ours = run(case, lane)
    on_device, active = lane.totals.experts_on_device, lane.totals.experts
    assert on_device == active if share == "all" else 0 < on_device < active
    for one, other in zip(ours, run(case, None), strict=True):
        assert (one - other).abs().max() / other.abs().max() < 1e-5


def test_bf16_rows_are_multiplied_in_bf16(fake: ModuleType) -> None:
    case = case_of(**CASES["q8_0"])
    lane = DeviceLane(cost_of([(1, 1e6), (2, 2e6)]), EXPERTS, device_experts(fake, case))
    for one, other in zip(run(case, lane, torch.bfloat16), run(case, None), strict=True):
        assert (one.float() - other).norm() / other.norm() < 2e-2


def test_an_emulated_device_changes_no_bit_and_is_named_so() -> None:
    case = case_of(**CASES["q8_0"])
    lane = DeviceLane(cost_of([(1, 1.0), (80, 80.0), (160, 1e4)]), EXPERTS)
    for one, other in zip(run(case, lane), run(case, None), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert lane.totals.planned_us < lane.totals.on_cpu_us
    assert "virtual clock" in totals_line(lane.totals, "a card", is_virtual=True)


def test_a_stream_has_two_slots_and_an_order(fake: ModuleType) -> None:
    stream = fake.open_device().expert_stream(
        case_of(**CASES["bf16"]).store, link_latency_us=5, link_bandwidth_gbps=1
    )
    with pytest.raises(RuntimeError, match="entered once"):
        stream.enter(0)
    stream.begin(0, 1)
    stream.begin(0, 2)
    with pytest.raises(RuntimeError, match="both staging slots"):
        stream.begin(0, 3)
    with pytest.raises(RuntimeError, match="not entered"):
        stream.leave(0)


def test_a_device_is_measured_and_trains_a_model(fake: ModuleType, tmp_path: Path) -> None:
    """Gradients of a model with the device's share are those without, and the plan comes from what was measured."""
    directory = write_tiny_model(
        tmp_path, replace(EXAMPLES["qwen2_moe"], hidden_size=64, moe_intermediate_size=32)
    )
    ids = torch.tensor([random_prompt(200, 3)])
    alone, beside = (open_base(directory, cpu_threads=1) for _ in range(2))
    device: Any = FakeDevice(fake.open_device())
    lane = use_device(beside, device, rank=4)
    lane.cost = cost_of([(1, 1.0), (20, 20.0), (60, 1e4)])
    of_models = []
    for base in (alone, beside):
        embedding = base.model.get_input_embeddings().weight.requires_grad_()
        base.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        of_models.append(embedding.grad)
    torch.testing.assert_close(of_models[1], of_models[0], rtol=1e-4, atol=1e-7)
    assert lane.totals.rows_on_device > 0
    assert "of the rows" in totals_line(lane.totals, "a card", is_virtual=False)


def test_experts_of_odd_sizes_stay_on_the_cpu(fake: ModuleType, tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, replace(EXAMPLES["qwen2_moe"], moe_intermediate_size=24))
    device: Any = FakeDevice(fake.open_device())
    with pytest.raises(ConfigError, match="multiples of 16"):
        use_device(open_base(directory, cpu_threads=1), device, rank=4)
