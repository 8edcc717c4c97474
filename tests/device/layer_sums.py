"""Every layer that a `DeviceRunner` computes against its experts, each computed alone on the CPU as it computes beside
a device (kernels/include/twofold/rounding.h).

The fake device computes an expert to the CPU's bits where both round alike, so wherever the experts of a token ran,
what is left between a layer and the sum of them is the order of float32 additions, which has a bound.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from twofold import _core
from twofold.blocks import ops
from twofold.device.runner import DeviceRunner

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


class LayerSums:
    """Watches a runner's layers, whoever places them."""

    def __init__(self, fake: ModuleType, runner: DeviceRunner) -> None:
        self.num_rows = 0
        """Rows of layers that were compared."""
        self.worst = 0.0
        """The largest error seen, as a share of what the order of additions can make."""
        self._executor = cpu_beside_device(fake, runner.moe.store, runner.moe.shape.num_experts)
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
        terms = outputs.astype(np.float64) * weights[routed].numpy()[:, :, None].astype(np.float64)
        start = before[routed].numpy().astype(np.float64)
        error = np.abs(hidden[routed].numpy() - (start + terms.sum(1)))
        # top_k products and top_k + 1 additions, each off by one unit of at most the sum of all magnitudes.
        limit = (2 * top_k + 1) * UNIT_F32 * (np.abs(start) + np.abs(terms).sum(1))
        self.worst = max(self.worst, float((error / np.maximum(limit, 1e-300)).max()))
        self.num_rows += len(rows)
