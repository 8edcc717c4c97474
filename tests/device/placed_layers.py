"""Layers whose experts a scheduler places on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from twofold import _core
from twofold.blocks import ops
from twofold.weights.weight_format import (
    LayerFormats,
    WeightMatrix,
    formats_by_expert,
    layer_formats,
)

LAYERS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 3, 8, 2, 64, 96
MANY = 40
FIGURES = {
    "handshake_us": 5.0,
    "cpu_bandwidth_gbps": 0.4,
    "cpu_gflops": 2.0,
    "cpu_expert_overhead_us": 1.0,
    "gpu_launch_us": 2.0,
    "vram_bandwidth_gbps": 100.0,
    "gpu_gflops": 1e5,
    "link_latency_us": 4.0,
    "link_bandwidth_gbps": 1.0,
    "contention": 0.2,
    "join_us": 1.0,
}


def formats_of(name: str) -> LayerFormats:
    """Formats of a layer whose experts have those of "f32+q8_0" in turn."""
    names = name.split("+")
    return layer_formats((names[expert % len(names)],) * 3 for expert in range(EXPERTS))


def make_store(pool: ops.ThreadPool, formats: list[str]) -> _core.ExpertStore:
    random = np.random.default_rng(3)
    store = _core.ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE, [formats_of(name) for name in formats])

    def matrix(rows: int, columns: int, name: str) -> WeightMatrix:
        values = random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        packed = np.ascontiguousarray(ops.quantise_rows(pool, values, name))
        element = {"f32": np.float32, "bf16": np.uint16}.get(name, np.uint8)
        return WeightMatrix(packed.view(element), name, columns)

    for layer, of_layer in enumerate(formats):
        experts = [
            (
                matrix(INTERMEDIATE, HIDDEN, name),
                matrix(INTERMEDIATE, HIDDEN, name),
                matrix(HIDDEN, INTERMEDIATE, name),
            )
            for name, *_ in formats_by_expert(formats_of(of_layer), EXPERTS)
        ]
        store.put(pool, layer, 0, experts)
    return store


def steps(num_steps: int, sizes: tuple[int, ...]) -> list[list[tuple[Any, Any, Any]]]:
    """For each step and layer: bf16 rows, ids, weights."""
    random = np.random.default_rng(11)
    made = []
    for step in range(num_steps):
        tokens = sizes[step % len(sizes)]
        layers = []
        for _ in range(LAYERS):
            # With MANY tokens an expert gets more than a tile.
            few = (np.arange(TOP_K if tokens == MANY else TOP_K + 2) + step // 5) % EXPERTS
            preferred = np.arange(EXPERTS) if 8 < tokens < MANY else few
            ids = np.stack([random.permutation(preferred)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
            rows = torch.from_numpy(random.standard_normal((tokens, HIDDEN), np.float32)).bfloat16()
            layers.append((rows, torch.from_numpy(ids), torch.rand(tokens, TOP_K)))
        made.append(layers)
    return made


def run_step(device: SimpleNamespace, number: int, layers: list[tuple[Any, Any, Any]]) -> Any:
    tokens = len(layers[0][0])
    hidden = torch.zeros((tokens, HIDDEN))
    device.executor.begin_step(number, [number] * tokens, list(range(tokens)))
    device.layers.begin_step()
    for layer, (rows, ids, weights) in enumerate(layers):
        device.layers.forward(layer, rows, ids, weights, hidden)
    device.layers.end_step()
    device.executor.end_step()
    return hidden


def alone(
    pool: ops.ThreadPool, store: _core.ExpertStore, number: int, layers: list[tuple[Any, Any, Any]]
) -> Any:
    executor = _core.MoeExecutor(pool, store)
    tokens = len(layers[0][0])
    hidden = np.zeros((tokens, HIDDEN), np.float32)
    executor.begin_step(number, [number] * tokens, list(range(tokens)))
    for layer, (rows, ids, weights) in enumerate(layers):
        executor.forward(layer, rows.float().numpy(), ids.numpy(), weights.numpy(), hidden)
    return torch.from_numpy(hidden)
