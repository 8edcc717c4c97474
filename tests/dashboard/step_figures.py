"""Figures of a step, as the dashboard reads them."""

from __future__ import annotations

from collections.abc import Mapping

from twofold.telemetry import queries


def step_figures(
    *,
    wall_us: float = 1000.0,
    parts_us: Mapping[str, float] | None = None,
    emulated_us: Mapping[str, float] | None = None,
    prefill: int = 0,
    misses: float | None = None,
    upload_bytes: float | None = None,
    **counters: float | None,
) -> queries.StepFigures:
    """A step on two threads that compute for 900 us each; what its parts do not take is the CPU's experts."""
    parts = dict(parts_us or {"attention": 200.0, "emit": 100.0})
    if parts_us is None:
        parts["experts_cpu"] = wall_us - sum(parts.values())
    emulated = emulated_us or {}
    times = queries.StepTimes(wall_us, parts, sum(emulated.values()), emulated)
    read: dict[str, float | None] = {
        "cpu_us": 1800.0,
        "engine_cpu_us": 900.0,
        "num_counted_steps": 1.0,
        "core_wait_us": 0.0,
        "others_core_wait_us": 0.0,
    }
    known = queries.StepCounters(**(read | counters))
    return queries.StepFigures(times, known, prefill, 1.0, misses, None, upload_bytes)
