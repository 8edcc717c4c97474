"""What bounds the steps of a window, in a sentence. No Streamlit: figures in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from twofold.telemetry import queries

from dashboard.figures.times import PART_NAMES

_PYTHON: Final = ("schedule", "batch", "emit", "telemetry", "rest")
"""Parts that compute nothing of the model."""
_READING: Final = ("experts_cpu", "dense_ffn", "head")
"""Parts that mostly read weights where few tokens share them."""
_BOUND: Final = 0.4
"""Share of the wall time from which one kind of work bounds a step."""
_NEAR: Final = 0.5
"""Share of the memory's rate from which memory is what a step waits for."""


def read_gbps(run: queries.Run, overview: queries.Overview) -> float | None:
    """GB/s at which the CPU's experts were read; None where none were. An expert that several tokens of a step share
    counts for each."""
    seconds = float(overview.part_seconds.get("experts_cpu", np.zeros(1)).sum())
    return overview.totals.num_cpu * run.expert_bytes / seconds / 1e9 if seconds else None


def verdict(parts_s: Mapping[str, float], rate_gbps: float | None, ceiling_gbps: float | None) -> str:
    """What bounds the steps; empty without any.

    Args:
        parts_s: wall seconds by the names of STEP_PARTS and "rest".
        rate_gbps: rate at which the CPU's experts were read; None where none were.
        ceiling_gbps: the memory's rate; None where it was not measured.
    """
    total = sum(parts_s.values())
    if total <= 0:
        return ""
    python = sum(parts_s.get(name, 0.0) for name in _PYTHON) / total
    if python >= _BOUND:
        return f"Bound by Python: {python:.0%} of the steps' wall time is outside the model's parts."
    largest = max(parts_s, key=lambda name: parts_s[name])
    share = parts_s[largest] / total
    if largest in _READING and rate_gbps and ceiling_gbps and rate_gbps >= _NEAR * ceiling_gbps:
        return f"Bound by memory bandwidth: {rate_gbps / ceiling_gbps:.0%} of {ceiling_gbps:.1f} GB/s."
    if largest == "experts_gpu" and share >= _BOUND:
        return f"Bound by the GPU: its experts take {share:.0%} of the steps' wall time."
    return f"Most wall time goes to {PART_NAMES[largest]}: {share:.0%}."
