"""Every layer that a `DeviceRunner` computes against its experts, each computed alone on the CPU as it computes beside
a device (kernels/include/twofold/rounding.h).

Device and CPU round the same values to the same kind between an expert's two products. Wherever the experts of a token
ran, what is left between a layer and the sum of them is the order of float32 additions, and one step of that rounding
for each value that another order puts on the other side of it: `expert_limit`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from twofold import _core
from twofold.blocks import ops
from twofold.device.runner import DeviceRunner
from twofold.models import open_model_files

F64 = npt.NDArray[np.float64]
UNIT_F32 = 2.0**-24
"""Largest relative error of one float32 operation."""
FIGURES = {
    "handshake_us": 5.0, "cpu_bandwidth_gbps": 1.0, "cpu_gflops": 2.0, "cpu_expert_overhead_us": 1.0,
    "gpu_launch_us": 2.0, "vram_bandwidth_gbps": 100.0, "gpu_gflops": 1e5, "link_latency_us": 4.0,
    "link_bandwidth_gbps": 1.0, "contention": 0.2, "join_us": 1.0,
}  # fmt: skip


def cpu_beside_device(fake: ModuleType, store: _core.ExpertStore, num_experts: int) -> _core.MoeExecutor:
    """An executor whose `forward` computes every expert on the CPU, rounding as beside a device."""
    machine = _core.MachineProfile.from_fields("fake", FIGURES)
    cost = _core.CostModel(machine, store.expert_bytes, store.flops_per_token, ())
    config = _core.SchedulerConfig(
        store.num_layers, num_experts, 1, 0, "lru", num_staging=1, fetch_rule="none"
    )
    accelerator = fake.open_device().accelerator(store, cost, config)
    return _core.MoeExecutor.on_device(ops.ThreadPool(1), store, accelerator)


def alone(executor: _core.MoeExecutor, layer: int, rows: Any, ids: Any) -> Any:
    """f32 [pairs, hidden] of rows f32 [tokens, hidden] through experts int32 [tokens, top_k], weighted by 1."""
    top_k = ids.shape[1]
    out = np.zeros((ids.size, rows.shape[1]), np.float32)
    executor.begin_step(0, [0] * ids.size, list(range(ids.size)))
    pairs = np.ascontiguousarray(ids.reshape(-1, 1))
    executor.forward(layer, np.repeat(rows, top_k, 0), pairs, np.ones((ids.size, 1), np.float32), out)
    return out


def between_roundings(kind: str, h: F64, error: F64) -> F64:
    """The most between what two values become as `kind`, each of them within `error` of h [..., columns]."""
    low, high = np.abs(h) - error, np.abs(h) + error
    if kind == "bf16":
        return to_bf16(high) - to_bf16(low)
    if kind == "f32":
        return high - low
    assert kind == "q8"
    runs = (*h.shape[:-1], -1, 32)
    low, high = low.reshape(runs), high.reshape(runs)
    few = 1 + 4 * UNIT_F32  # the scale and its reciprocal are rounded, too
    least, most = low.max(-1, keepdims=True) / 127 / few, high.max(-1, keepdims=True) / 127 * few
    steps = np.rint(high / least) * most - np.minimum(
        np.rint(low / most) * least, np.rint(low / least) * most
    )
    return np.asarray(steps.reshape(h.shape))


def as_q8(x: F64) -> F64:
    runs = x.reshape(len(x), -1, 32)
    scales = np.abs(runs).max(-1, keepdims=True) / 127
    return (np.round(runs / scales) * scales).reshape(x.shape)


def to_bf16(values: F64) -> F64:
    """Rounded to 8 bits of significand, to nearest, ties to even."""
    significand, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(significand * 256), exponent - 8))


def expert_limit(expert: tuple[F64, F64, F64], x: F64, kind: str) -> F64:
    """[rows, hidden]: the most between two sides' outputs of one expert (gate, up, down) for x [rows, columns].

    Both multiply the same x with the same weights and round h = silu(gate x) * (up x) to `kind`. A sum of K products is
    off by 2 sqrt(K) units of float32 of the sum of magnitudes: its additions' errors have random signs. Such an error
    moves h by at most error_h, and the rounded h by `between_roundings`: mostly by nothing, by a step of the rounding
    where h lies within error_h of the point between two steps. Output n moves by sum_i |down[n, i]| times that, and by
    its own sum's error on either side.
    """
    gate, up, down = expert

    def units(columns: int) -> float:
        return 2 * columns**0.5 * UNIT_F32

    g, u = x @ gate.T, x @ up.T
    error_g, error_u = (units(x.shape[1]) * (np.abs(x) @ np.abs(part).T) for part in (gate, up))
    silu = g / (1 + np.exp(-g))
    h = silu * u
    # silu's slope is 1.1 at most; __expf, a division and two products round.
    error_h = 1.1 * error_g * np.abs(u) + np.abs(silu) * error_u + 8 * UNIT_F32 * np.abs(h)
    moved = between_roundings(kind, h, error_h)
    return np.asarray((moved + 2 * units(h.shape[1]) * np.abs(h)) @ np.abs(down).T)


class LayerSums:
    """Checks the outputs of a runner's layers, wherever placement is decided. The model has bf16 weights."""

    def __init__(self, fake: ModuleType, runner: DeviceRunner, path: Path) -> None:
        self.num_rows = 0
        """Rows of layers that were compared."""
        self.worst = 0.0
        """The largest error seen, relative to the bound from the order of additions and the roundings after it."""
        self._executor = cpu_beside_device(fake, runner.moe.store, runner.moe.shape.num_experts)
        files, pool = open_model_files(path), ops.ThreadPool(1)
        self._experts = [
            [
                tuple(ops.dequantise(pool, part).astype(np.float64) for part in expert)
                for expert in files.expert_weights(layer)
            ]
            for layer in files.config.moe_layers
        ]
        self._table, self._placed = runner._layers, runner._placed
        for layers in (self._table, self._placed):
            self._watch(layers)

    def _watch(self, layers: Any) -> None:
        compute = layers.forward

        def forward(moe_layer: int, normed: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor) -> None:
            before = hidden.clone()
            compute(moe_layer, normed, ids, weights, hidden)
            if layers is self._placed or self._table._posting:  # a rehearsal leaves out what is on the CPU
                self._compare(moe_layer, normed, ids, weights, before, hidden)

        layers.forward = forward

    def _compare(
        self, layer: int, normed: Tensor, ids: Tensor, weights: Tensor, before: Tensor, hidden: Tensor
    ) -> None:
        routed = ids[:, 0] >= 0
        np.testing.assert_array_equal(hidden[~routed], before[~routed])  # padding
        rows, experts = normed[routed].float().numpy(), np.ascontiguousarray(ids[routed].numpy())
        if len(rows) == 0:
            return
        top_k = experts.shape[1]
        outputs = alone(self._executor, layer, rows, experts).reshape(len(rows), top_k, -1)
        shares = weights[routed].numpy()[:, :, None].astype(np.float64)
        terms = outputs.astype(np.float64) * shares
        limits = np.zeros_like(terms)
        for expert in np.unique(experts):
            tokens, ranks = np.nonzero(experts == expert)
            limits[tokens, ranks] = expert_limit(
                self._experts[layer][expert], rows[tokens].astype(np.float64), "bf16"
            )
        start = before[routed].numpy().astype(np.float64)
        error = np.abs(hidden[routed].numpy() - (start + terms.sum(1)))
        # top_k products and top_k + 1 additions, each off by one unit of at most the sum of all magnitudes.
        limit = (2 * top_k + 1) * UNIT_F32 * (np.abs(start) + np.abs(terms).sum(1)) + (shares * limits).sum(1)
        self.worst = max(self.worst, float((error / np.maximum(limit, 1e-300)).max()))
        self.num_rows += len(rows)
