"""The cost model against the design's formulas, written out a second time in Python."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold import _core
from twofold import _testing as testing

FIELDS = {
    "handshake_us": 10.0,
    "cpu_bandwidth_gbps": 50.0,
    "cpu_gflops": 1000.0,
    "cpu_expert_overhead_us": 3.0,
    "gpu_launch_us": 8.0,
    "vram_bandwidth_gbps": 900.0,
    "gpu_gflops": 80_000.0,
    "link_latency_us": 12.0,
    "link_bandwidth_gbps": 25.0,
    "contention": 0.22,
    "join_us": 4.0,
}
BYTES = 10e6
FLOPS = 37e6


def model(**changes: float) -> testing.CostModel:
    return testing.CostModel(_core.MachineProfile.from_fields("test", {**FIELDS, **changes}), BYTES, FLOPS)


def cpu_expert(n: int) -> float:
    return FIELDS["cpu_expert_overhead_us"] + max(BYTES / 50e3, FLOPS * n / 1e6)


def gpu_expert(n: int) -> float:
    return max(BYTES / 900e3, FLOPS * n / 80e6)


UPLOAD = 12.0 + BYTES / 25e3
loads = st.lists(st.integers(1, 600), max_size=12)


@settings(max_examples=200, deadline=None)
@given(hits=loads, fetched=loads, cpu=loads, backlog=st.floats(0, 5000), background=st.floats(0, 5000))
def test_layer_follows_the_formula(hits, fetched, cpu, backlog, background):
    times, landed = model().layer(hits, fetched, cpu, backlog, backlog + background)

    expected_landed = [backlog + (i + 1) * UPLOAD for i in range(len(fetched))]
    gpu = 8.0 + sum(map(gpu_expert, hits)) if hits or fetched else 0.0
    for at, n in zip(expected_landed, fetched, strict=True):
        gpu = max(gpu, at) + gpu_expert(n)
    cpu_us = 0.0
    if cpu:
        work = sum(map(cpu_expert, cpu))
        copying = backlog + background + len(fetched) * UPLOAD
        busy = min(1.0, copying / (work * 1.22))
        cpu_us = 10.0 + work * (1 + 0.22 * busy)
        assert times.dma_busy == pytest.approx(busy)
        assert times.cpu_us == pytest.approx(model().cpu_us(cpu, busy))
    assert landed == pytest.approx(expected_landed)
    assert times.gpu_us == pytest.approx(gpu)
    assert times.cpu_us == pytest.approx(cpu_us)
    assert times.layer_us == pytest.approx(max(gpu, cpu_us) + 4.0)


def test_contention_slows_the_cpu_only_while_the_link_copies():
    alone, _ = model().layer([], [], [1, 1], 0.0)
    loaded, _ = model().layer([], [], [1, 1], 0.0, 100.0)
    assert alone.cpu_us == pytest.approx(10.0 + 2 * cpu_expert(1))
    # During 100 us of copying 100/1.22 us of work gets done.
    assert loaded.cpu_us == pytest.approx(10.0 + 100.0 + (2 * cpu_expert(1) - 100.0 / 1.22))


def test_one_transfer_pays_the_latency_once():
    _, landed = model().layer([], [1, 1, 1], [], 0.0, one_transfer=True)
    assert landed == pytest.approx([12 + 400, 12 + 800, 12 + 1200])


def test_empty_sides_cost_nothing():
    assert model().cpu_us([], 1.0) == 0
    assert model().layer([], [], [])[0].gpu_us == 0
    assert model().layer([], [], [])[0].layer_us == 4.0


def test_adapters_are_read_beside_each_expert_on_its_side():
    plain, adapted = model(), model().with_adapters(1e6)
    assert adapted.layer_us([1, 600], []) == pytest.approx(plain.layer_us([1, 600], []) + 2 * 1e6 / 900e3)
    assert adapted.layer_us([], [3]) == pytest.approx(plain.layer_us([], [3]) + 1e6 / 50e3)
    assert plain.with_adapters(0).layer_us([1, 2], [3]) == plain.layer_us([1, 2], [3])
    with pytest.raises(ValueError, match="adapter_bytes"):
        plain.with_adapters(-1)


def test_measured_curve_replaces_the_formula():
    cost = testing.CostModel(
        _core.MachineProfile.from_fields("t", FIELDS), BYTES, FLOPS, [(1, 200.0), (8, 340.0), (64, 3140.0)]
    )
    assert cost.cpu_expert_us(1) == 200
    assert cost.cpu_expert_us(4) == pytest.approx(260)
    assert cost.cpu_expert_us(64) == 3140
    assert cost.cpu_expert_us(128) == pytest.approx(3140 + 64 * 50)


def test_the_price_of_an_upload_is_the_contention_it_causes_in_misses():
    misses = UPLOAD / (cpu_expert(1) - gpu_expert(1))
    assert _core.default_upload_price(model()) == pytest.approx(0.5 * FIELDS["contention"] * misses)


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_missing_field_is_named(field):
    fields = {k: v for k, v in FIELDS.items() if k != field}
    with pytest.raises(ValueError, match=f"{field} is missing"):
        _core.MachineProfile.from_fields("test", fields)


@pytest.mark.parametrize("field", sorted(FIELDS))
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_figure_is_named_with_its_value(field, value):
    with pytest.raises(ValueError, match=rf"'test': {field} = .* given, a finite number .* expected"):
        _core.MachineProfile.from_fields("test", {**FIELDS, field: value})


def test_zero_rates_and_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="link_bandwidth_gbps = 0"):
        _core.MachineProfile.from_fields("test", {**FIELDS, "link_bandwidth_gbps": 0.0})
    with pytest.raises(ValueError, match="unknown field link_bandwith"):
        _core.MachineProfile.from_fields("test", {**FIELDS, "link_bandwith": 3.0})


@pytest.mark.parametrize(
    "curve", [[(1, 5.0), (1, 6.0)], [(4, 5.0), (2, 6.0)], [(0, 5.0)], [(1, -5.0)], [(1, math.nan)]]
)
def test_bad_curve_is_refused(curve):
    with pytest.raises(ValueError, match="cpu_curve"):
        testing.CostModel(_core.MachineProfile.from_fields("t", FIELDS), BYTES, FLOPS, curve)
