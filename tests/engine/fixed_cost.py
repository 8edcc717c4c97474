"""A machine for tests of plans and times that need one and not a certain one."""

from __future__ import annotations

from twofold import _core
from twofold import _testing as testing


def fixed_cost() -> testing.CostModel:
    """Experts of 10 MB; fetching one takes 412 us, computing one token on the CPU 202 us."""
    fields = {
        "handshake_us": 10,
        "cpu_bandwidth_gbps": 50,
        "cpu_gflops": 1000,
        "cpu_expert_overhead_us": 2,
        "gpu_launch_us": 8,
        "vram_bandwidth_gbps": 900,
        "gpu_gflops": 80_000,
        "link_latency_us": 12,
        "link_bandwidth_gbps": 25,
        "contention": 0.2,
        "join_us": 4,
    }
    return testing.CostModel(_core.MachineProfile.from_fields("fixed", fields), 10e6, 37e6)
