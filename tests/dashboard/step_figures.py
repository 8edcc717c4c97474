"""Figures of a step, as the dashboard reads them."""

from __future__ import annotations

from collections.abc import Mapping

from twofold.telemetry import queries


def step_figures(
    *,
    wall_us: float = 1000.0,
    parts_us: Mapping[str, float] | None = None,
    emulated_us: Mapping[str, float] | None = None,
    cpu_us: float | None = 2000.0,
    switches: int = 0,
    faults: int = 0,
    prefill: int = 0,
) -> queries.StepFigures:
    """A step on two threads; what its parts do not take is the CPU's experts."""
    parts = dict(parts_us or {"attention": 200.0, "emit": 100.0})
    if parts_us is None:
        parts["experts_cpu"] = wall_us - sum(parts.values())
    emulated = emulated_us or {}
    times = queries.StepTimes(wall_us, parts, sum(emulated.values()), emulated)
    return queries.StepFigures(times, queries.StepCounters(switches, faults, cpu_us), prefill)
