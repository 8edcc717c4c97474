"""Figures of the cost model that a run was planned with, from the run's own row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from twofold.telemetry.queries.copies import LinkCeiling
from twofold.telemetry.queries.runs import Run


@dataclass(frozen=True)
class RunCosts:
    """Calibrated figures of a run's machine and sizes of its model; see `twofold.experts.profiles`."""

    machine: str
    figures: Mapping[str, float]
    sizes: tuple[float, ...]
    """`twofold.api.types.TraceSizes`; empty if unknown."""

    @property
    def link(self) -> LinkCeiling:
        return LinkCeiling(self.figures["link_latency_us"], self.figures["link_bandwidth_gbps"])

    @property
    def cpu_bandwidth_gbps(self) -> float:
        return self.figures["cpu_bandwidth_gbps"]


def run_costs(run: Run) -> RunCosts | None:
    """The figures; None for a run on an uncalibrated CPU, and for one recorded before runs kept them."""
    machine = run_settings(run).get("machine")
    if not isinstance(machine, dict):
        return None
    sizes = machine.get("model_sizes") or ()
    return RunCosts(str(machine["name"]), dict(machine["figures"]), tuple(map(float, sizes)))


def run_settings(run: Run) -> Mapping[str, object]:
    """The run's configuration by name of the setting; empty if it is not a JSON object."""
    try:
        settings = json.loads(run.config_json)
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}
