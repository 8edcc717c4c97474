"""Kernels beside what the card can do: copy bandwidth for decode, torch's product for prefill; and the handshake."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from twofold.device.calibration import Routing
from twofold.device.probe import KernelProbe
from twofold.experts.slot_plan import MoeShape

from benchmarks.gpu.machine import Machine, expect
from benchmarks.gpu.models import SHAPES, shrunk

COPY_SHARE = 0.8
"""Share of the copy bandwidth that decode must reach."""
PRODUCT_SHARE = 0.5
"""Share of the speed of torch's bf16 product that prefill must reach."""


def copy_gbps(machine: Machine) -> float:
    """Read and written bytes of a copy within the device's memory."""

    def measure() -> float:
        source = torch.empty(machine.sizes.copy_bytes, dtype=torch.uint8, device=machine.device).random_()
        target = torch.empty_like(source)
        us = machine.time_us(lambda: [target.copy_(source) for _ in range(4)], 4)
        return 2 * source.numel() / us / 1e3

    return float(machine.keep("copy", measure))


def product_tflops(machine: Machine) -> float:
    """torch's bf16 product of random matrices."""

    def measure() -> float:
        rows = machine.sizes.product_rows
        a, b = (torch.randn(rows, rows, device=machine.device).bfloat16() for _ in range(2))
        return 2 * rows**3 / machine.time_us(lambda: [a @ b for _ in range(8)], 8) / 1e6

    return float(machine.keep("product", measure))


def copy_bandwidth(machine: Machine) -> dict[str, Any]:
    """The ceiling of decode."""
    return {"gbps": copy_gbps(machine)}


def torch_product(machine: Machine) -> dict[str, Any]:
    """The ceiling of prefill."""
    return {"tflops": product_tflops(machine)}


def handshake(machine: Machine) -> dict[str, Any]:
    """Each way there is, in microseconds per layer."""
    found = dict(machine.hardware.native.probe_handshakes(2048))
    times = {probe["kind"]: probe["us"] for probe in found["probes"] if probe["works"]}
    return expect(found, times[found["kind"]] <= 10.0, "the chosen way takes at most 10 us per layer")


def probe_of(machine: Machine, name: str, format: str) -> KernelProbe:
    """A layer of random experts in slots; the previous one is freed."""
    others = [key for key in machine.kept if isinstance(key, tuple) and key[0] == "probe"]
    machine.forget(*(key for key in others if key[1:] != (name, format)))
    shape = shrunk(SHAPES[name], machine.sizes.shrink)
    layer = MoeShape(1, shape.num_experts, shape.top_k, shape.hidden, shape.intermediate, ((format,) * 3,))
    if format.endswith("_k") and layer.hidden % 256:  # shrunk for a rehearsal
        layer = dataclasses.replace(layer, hidden=256, intermediate=256)
    return machine.keep(("probe", name, format), lambda: KernelProbe(machine.hardware, layer))  # type: ignore[no-any-return]


def routed(machine: Machine, name: str, num_tokens: int, seed: int) -> Routing:
    """Every token goes to top-k experts at random."""
    shape = shrunk(SHAPES[name], machine.sizes.shrink)
    num_tokens = min(num_tokens, machine.sizes.kernel_tokens)
    random = np.random.default_rng(seed)
    scores = random.random((num_tokens, shape.num_experts)).argsort(axis=1)[:, : shape.top_k]
    return Routing(tuple(tuple(int(i) for i in row) for row in scores))


def decode(machine: Machine, name: str, format: str, num_tokens: int) -> dict[str, Any]:
    """Bytes of the experts touched over time, beside the copy bandwidth."""
    probe = probe_of(machine, name, format)
    routings = [routed(machine, name, num_tokens, seed) for seed in range(3)]
    for routing in routings:
        probe.routed_us(routing)
    times = [np.median([probe.routed_us(r) for _ in range(machine.sizes.rounds)]) for r in routings]
    touched = sum(len(r.loads) for r in routings)
    gbps = float(touched * probe.expert_bytes / sum(times) / 1e3)
    share = gbps / copy_gbps(machine)
    figures = {"us": float(np.mean(times)), "experts": touched / 3, "gbps": gbps, "share_of_copy": share}
    return expect(figures, share >= COPY_SHARE, f"at least {100 * COPY_SHARE:.0f} % of the copy bandwidth")


def prefill(machine: Machine, name: str, format: str, num_tokens: int) -> dict[str, Any]:
    """Operations over time, beside torch's product; all experts in slots, grouping beforehand."""
    probe = probe_of(machine, name, format)
    shape = shrunk(SHAPES[name], machine.sizes.shrink)
    routing = routed(machine, name, min(num_tokens, probe.most_tokens), 0)
    probe.routed_us(routing)
    us = float(np.median([probe.routed_us(routing) for _ in range(machine.sizes.rounds)]))
    tflops = 6 * len(routing.ids) * shape.top_k * shape.hidden * shape.intermediate / us / 1e6
    share = tflops / product_tflops(machine)
    figures = {"us": us, "tflops": tflops, "share_of_product": share}
    return expect(
        figures, share >= PRODUCT_SHARE, f"at least {100 * PRODUCT_SHARE:.0f} % of torch's bf16 product"
    )
