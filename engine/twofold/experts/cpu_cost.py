"""Cost model of a CPU alone, from a measured curve. Predicts; measures nothing."""

from __future__ import annotations

from twofold import _core
from twofold.experts.profiles import CpuCurve, MachineProfile


def cpu_cost_model(curve: CpuCurve, expert_bytes: float) -> _core.CostModel:
    """The native cost model of a CPU alone: the curve and the layer's fixed cost, no accelerator."""
    figures = dict.fromkeys(
        ("cpu_expert_overhead_us", "gpu_launch_us", "link_latency_us", "contention", "join_us"), 0.0
    ) | dict.fromkeys(
        ("cpu_bandwidth_gbps", "cpu_gflops", "vram_bandwidth_gbps", "gpu_gflops", "link_bandwidth_gbps"), 1.0
    )
    profile = _core.MachineProfile.from_fields("cpu", figures | {"handshake_us": curve.layer_us})
    return _core.CostModel(profile, expert_bytes, 6.0 * curve.hidden * curve.intermediate, curve.points)


def machine_cost_model(
    machine: MachineProfile, store: _core.ExpertStore, curve: CpuCurve | None
) -> _core.CostModel:
    """The native cost model of a machine with an accelerator."""
    return _core.CostModel(
        machine.native(),
        max(1, store.mean_expert_bytes),  # 0 in a model without experts
        store.flops_per_token,
        curve.points if curve else (),
    )
