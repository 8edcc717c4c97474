"""Why a step took longer than usual: its largest part against its own median, then what the kernel's counters tell.

No Streamlit: figures in, sentences out. The same rule holds for every accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twofold.telemetry import queries

from dashboard import formats
from dashboard.figures.times import PART_NAMES

_LONGER: Final = 1.15
"""Ratio to the median from which a step took longer than usual."""
_IDLE: Final = 0.5
"""Share of the excess that no CPU time explains, from which the process did not run."""


def sentences(step: queries.StepFigures, usual: queries.StepFigures) -> list[str]:
    """The largest part and the likely cause, by the wall clock; on an emulated clock its largest part too."""
    found = []
    if step.times.wall_us < _LONGER * usual.times.wall_us:
        found.append("By the wall clock it took as long as usual.")
    else:
        found += [
            _largest(step.times.parts_us, usual.times.parts_us, step.times.wall_us - usual.times.wall_us)
        ]
        cause = _cause(step, usual)
        found.append(f"{cause[0].upper()}{cause[1:]}.")
    if step.times.emulated_us >= _LONGER * usual.times.emulated_us > 0:
        excess_us = step.times.emulated_us - usual.times.emulated_us
        text = _largest(step.times.emulated_parts_us, usual.times.emulated_parts_us, excess_us)
        found.append(f"On the emulated clock: {text[0].lower()}{text[1:]}")
    return found


def _largest(parts_us: Mapping[str, float], usual_us: Mapping[str, float], excess_us: float) -> str:
    """The part that grew most."""
    more = {name: us - usual_us.get(name, 0.0) for name, us in parts_us.items()}
    name = max(more, key=lambda each: more[each])
    share = min(1.0, more[name] / excess_us) if excess_us > 0 else 0.0
    return (
        f"Most of the delay is **{PART_NAMES[name]}**: {formats.microseconds(parts_us[name])}, usually "
        f"{formats.microseconds(usual_us.get(name, 0.0))} ({share:.0%} of what the step took longer)."
    )


def _cause(step: queries.StepFigures, usual: queries.StepFigures) -> str:
    counters, before = step.counters, usual.counters
    if counters.cpu_us is None or before.cpu_us is None:
        if step.num_prefill_tokens > usual.num_prefill_tokens:
            return _prefill(step)
        return "no cause is known: the kernel's counters of this step were read with a later one"
    excess_us = step.times.wall_us - usual.times.wall_us
    threads = max(1.0, before.cpu_us / usual.times.wall_us)
    computed_us = max(0.0, counters.cpu_us - before.cpu_us) / threads
    if counters.major_faults:
        return f"{counters.major_faults:,} pages were read from disk in this step: too little memory"
    if excess_us - computed_us >= _IDLE * excess_us:
        switches = counters.involuntary_switches or 0
        if switches > (before.involuntary_switches or 0):
            times = "once" if switches == 1 else f"{switches:,} times"
            return f"another process: the kernel took a core from the server {times}, and CPU time did not grow with it"
        return (
            "the process did not run: it was stopped or waited, as its CPU time did not grow and no core was taken "
            "away"
        )
    if step.num_prefill_tokens > usual.num_prefill_tokens:
        return _prefill(step)
    return "it computed more: its CPU time grew as much"


def _prefill(step: queries.StepFigures) -> str:
    return f"other requests' prompts: {int(step.num_prefill_tokens):,} of their tokens were computed in the same step"
