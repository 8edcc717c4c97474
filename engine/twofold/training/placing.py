"""Gives a base in training a device beside the CPU: a real one, or an emulated one whose times are virtual."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.device.device import Device
from twofold.experts.profiles import MachineProfile
from twofold.experts.slot_plan import MoeShape
from twofold.step.expert_loading import moe_shape
from twofold.training.base import BaseModel, expert_modules
from twofold.training.device_experts import COLUMNS, DeviceExperts, ExpertKind, LayerInput, Pairs
from twofold.training.device_lane import DeviceLane, training_cost
from twofold.training.experts import ExpertLayer
from twofold.training.factors import Factors

_TIMED_UPLOADS: Final = 8
_TIMED_TOKENS: Final = (1, 8, 32, 128)
_TIMED_EXPERTS: Final = 8
_FEW, _MANY = 16, 1024
"""Tokens of an expert whose times tell its fixed cost and its rate on a device."""


def emulate_device(base: BaseModel, profile: MachineProfile, *, rank: int) -> DeviceLane:
    """Plan all layers for a device of this profile; the CPU computes them, and its time is measured here.

    rank: of the factors that are trained.
    """
    layers, shape = _layers(base), moe_shape(base.files)
    curve = _cpu_curve(layers[0], _factors(shape, rank))
    return _attached(layers, training_cost(profile.cost_figures, base.store, curve), shape, None)


def use_device(base: BaseModel, device: Device, *, rank: int) -> DeviceLane:
    """Let a device compute the experts that the plan of a layer gives it. Its figures and the CPU's are measured here.

    Raises:
        ConfigError: the experts' sizes are none that a device unpacks.
        CapacityError: no room for two experts.
    """
    layers, shape = _layers(base), moe_shape(base.files)
    if shape.hidden % COLUMNS or shape.intermediate % COLUMNS:
        raise ConfigError(
            f"experts of {shape.hidden} × {shape.intermediate} given; a device trains multiples of {COLUMNS}; use "
            "--accelerator none"
        )
    factors = _factors(shape, rank)
    upload_us = _upload_us(device, base.store)
    link = 0.0, base.store.mean_expert_bytes / (upload_us * 1e3)
    kinds = [ExpertKind(shape.activation, limit, shape.biases) for limit in _limits(shape)]
    experts = DeviceExperts(device, base.store, kinds, (shape.hidden, shape.intermediate), link)
    figures = _device_figures(device, experts, factors, base.store, upload_us)
    curve = _cpu_curve(layers[0], factors)
    return _attached(layers, training_cost(figures, base.store, curve), shape, experts)


def _layers(base: BaseModel) -> list[ExpertLayer]:
    return [module.twofold_layer for module in expert_modules(base.model)]  # type: ignore[misc]


def _attached(
    layers: list[ExpertLayer], cost: _core.CostModel, shape: MoeShape, experts: DeviceExperts | None
) -> DeviceLane:
    lane = DeviceLane(cost, shape.num_experts, experts)
    for layer in layers:
        layer.lane = lane
    return lane


def _limits(shape: MoeShape) -> tuple[float, ...]:
    return shape.limits or (0.0,) * shape.num_layers


def _factors(shape: MoeShape, rank: int) -> tuple[Factors, ...]:
    """Factors of gate, up and down to measure with."""
    sizes = ((shape.intermediate, shape.hidden),) * 2 + ((shape.hidden, shape.intermediate),)
    return tuple(
        Factors(torch.zeros(shape.num_experts, rank, columns), torch.zeros(shape.num_experts, rows, rank))
        for rows, columns in sizes
    )


def _upload_us(device: Device, store: _core.ExpertStore) -> float:
    """Measured time of an expert's upload."""
    probe = device.native.probe_uploads(store, _TIMED_UPLOADS, demand=True)
    return max(1e-3, float(probe["us"]) * store.mean_expert_bytes / max(1, int(probe["bytes"])))


def _device_figures(
    device: Device,
    experts: DeviceExperts,
    factors: tuple[Factors, ...],
    store: _core.ExpertStore,
    upload_us: float,
) -> dict[str, float]:
    """A profile's figures of the device, from an expert with few and with many tokens.

    Both include its uploads; what is left of the few is its fixed cost, and the difference gives the rate.
    """
    many = min(_MANY, 32 * device.most_tokens)
    few_us, many_us = (device.time_us(_expert_run(experts, factors, tokens)) for tokens in (_FEW, many))
    flops = 3 * store.flops_per_token * (many - _FEW)
    fixed_us = max(few_us - 2 * upload_us, 1.0)
    return {
        "cpu_bandwidth_gbps": 1.0,
        "cpu_gflops": 1.0,
        "cpu_expert_overhead_us": 0.0,
        "handshake_us": 0.0,
        "gpu_launch_us": 0.0,
        "vram_bandwidth_gbps": 2 * store.mean_expert_bytes / (fixed_us * 1e3),
        "gpu_gflops": max(1e-3, flops / (max(many_us - few_us, 1.0) * 1e3)),
        "link_latency_us": 0.0,
        "link_bandwidth_gbps": store.mean_expert_bytes / (upload_us * 1e3),
        "contention": 0.0,
        "join_us": 0.0,
    }


def _expert_run(experts: DeviceExperts, factors: tuple[Factors, ...], tokens: int) -> Callable[[], None]:
    """Forward and backward of the first expert, once run already."""
    place = experts.torch_device
    there = tuple(Factors(each.a.to(place), each.b.to(place)) for each in factors)
    x = torch.ones(tokens, factors[0].a.shape[-1], device=place)
    of = LayerInput(0, x, torch.ones(tokens, 1, device=place), there)
    every = torch.arange(tokens, device=place)
    pairs = [Pairs(0, every, torch.zeros_like(every))]
    gradients = [torch.empty_like(part[:1]) for each in there for part in (each.a, each.b)]

    def run() -> None:
        experts.forward(of, pairs)
        experts.backward(of, pairs, x, gradients)

    run()
    return run


def _cpu_curve(layer: ExpertLayer, factors: tuple[Factors, ...]) -> list[tuple[int, float]]:
    """Measured (tokens of an expert, microseconds of it) of forward and backward with all threads.

    factors: of gate, up and down, all three.
    """
    num_experts, _, hidden = factors[0].a.shape
    of_layer = min(_TIMED_EXPERTS, num_experts)
    points: list[tuple[int, float]] = []
    for tokens in _TIMED_TOKENS:
        x = torch.ones(tokens * of_layer, hidden).requires_grad_()
        ids = torch.arange(of_layer).repeat_interleave(tokens)[:, None]
        weights = torch.ones(len(x), 1)
        best = float("inf")
        for _ in range(2):
            begin = time.perf_counter()
            torch.autograd.grad(layer(x, ids, weights, factors).sum(), x)
            best = min(best, time.perf_counter() - begin)
        points.append((tokens, best * 1e6 / of_layer))
    return _rising(points)


def _rising(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """More tokens never take less time: the cost model asks for it, a busy machine may measure otherwise."""
    times = np.maximum.accumulate([us for _, us in points])
    return [(tokens, float(us)) for (tokens, _), us in zip(points, times, strict=True)]
