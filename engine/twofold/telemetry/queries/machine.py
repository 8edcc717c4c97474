"""The machine that a run was recorded on, as the engine described it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twofold.telemetry.queries.runs import Run


@dataclass(frozen=True)
class MachineFacts:
    """Sections of `run.machine_json`; empty where the run has none."""

    system: Mapping[str, str] = field(default_factory=dict)
    """Processor, cores, memory, NUMA nodes, kernel."""
    versions: Mapping[str, str] = field(default_factory=dict)
    profile: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Figures of the cost model by name: value and source."""
    ceilings: Mapping[str, float] = field(default_factory=dict)
    """Measured ceilings by name, with units in the names."""

    @property
    def read_gb_per_s(self) -> float | None:
        """Most bytes that all threads read from memory per second, in GB/s; None if not recorded."""
        found = self.ceilings.get("read_gb_per_s")
        if found is None and "cpu_bandwidth_gbps" in self.profile:
            found = self.profile["cpu_bandwidth_gbps"]["value"]
        return found


def machine_facts(run: Run) -> MachineFacts:
    """What the engine recorded about its machine."""
    stored = json.loads(getattr(run, "machine_json", None) or "{}")
    return MachineFacts(
        **{name: stored[name] for name in MachineFacts.__dataclass_fields__ if name in stored}
    )
