"""Random machines of one device or several."""

from __future__ import annotations

import random

from twofold import _core
from twofold import _testing as testing


def random_figures(rng: random.Random) -> dict[str, float]:
    return {
        "handshake_us": rng.uniform(0, 60),
        "cpu_bandwidth_gbps": 10 ** rng.uniform(1, 2.6),
        "cpu_gflops": 10 ** rng.uniform(2, 4.3),
        "cpu_expert_overhead_us": rng.uniform(0, 10),
        "gpu_launch_us": rng.uniform(0, 30),
        "vram_bandwidth_gbps": 10 ** rng.uniform(2.3, 3.6),
        "gpu_gflops": 10 ** rng.uniform(3.5, 5.7),
        "link_latency_us": rng.uniform(0, 30),
        "link_bandwidth_gbps": 10 ** rng.uniform(0.5, 2),
        "contention": rng.uniform(0, 0.6),
        "join_us": rng.uniform(0, 10),
    }


def random_cost(rng: random.Random, num_devices: int) -> testing.CostModel:
    first, *others = (
        _core.MachineProfile.from_fields(f"d{d}", random_figures(rng)) for d in range(num_devices)
    )
    return testing.CostModel(first.with_devices(others), 10 ** rng.uniform(5.5, 8), 10 ** rng.uniform(6, 9))
