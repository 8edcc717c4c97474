"""Figures of the cost model that a run was planned with, from the run's own row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from twofold.telemetry.queries.copies import LinkCeiling
from twofold.telemetry.queries.runs import Run


@dataclass(frozen=True)
class RunCosts:
    """Calibrated figures of a run's machine; see `twofold.experts.profiles`."""

    machine: str
    figures: Mapping[str, float]

    @property
    def link(self) -> LinkCeiling:
        return LinkCeiling(self.figures["link_latency_us"], self.figures["link_bandwidth_gbps"])

    @property
    def cpu_bandwidth_gbps(self) -> float:
        return self.figures["cpu_bandwidth_gbps"]


def run_costs(run: Run) -> RunCosts | None:
    """The figures; None for a run on an uncalibrated CPU, and for one recorded before runs kept them."""
    stored = json.loads(run.machine_json)
    figures = {name: float(figure["value"]) for name, figure in (stored.get("profile") or {}).items()}
    if not figures:
        return None
    return RunCosts(str(stored.get("name", "")), figures)


def model_sizes(run: Run) -> tuple[float, ...]:
    """Sizes of the run's model (`TraceSizes`); empty if not recorded."""
    return tuple(map(float, json.loads(run.machine_json).get("model_sizes") or ()))


def run_settings(run: Run) -> Mapping[str, object]:
    """The run's configuration by name of the setting; empty if it is not a JSON object."""
    try:
        settings = json.loads(run.config_json)
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}
