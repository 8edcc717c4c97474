"""Why a step took longer than usual: its largest part against its own median, then the cause that its counters support.

No Streamlit: figures in, sentences out. The same rule holds for every accelerator. Each possible cause is given the
microseconds that it explains of what the step took longer; the one that explains most is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from twofold.telemetry import queries

from dashboard import formats
from dashboard.figures.times import PART_NAMES

LONGER: Final = 1.15
"""Ratio to the median from which a step took longer than usual."""
_SUPPORTED: Final = 1 / 3
"""Share of the excess that a cause must explain to be named."""
_DISK_READ_US: Final = 20_000.0
"""Longest time that one page read from disk is taken to explain."""
_MAPPING_US: Final = 2.0
"""The same of a page that was mapped without reading."""
_TICK_US: Final = 4000.0
"""The kernel adds to a running thread's time this rarely: the time of others is too long by as much."""
_BUSY_ENGINE: Final = 0.7
"""Share of CPU time in wall time from which the engine's thread does not sleep while it waits for a device."""
_EXPERTS: Final = ("experts_cpu", "experts_gpu", "link")
_PYTHON_PARTS: Final = {"schedule", "batch", "sampling", "emit", "telemetry", "rest"}

Kind = Literal[
    "busy core",
    "own threads",
    "pinned thread",
    "stopped",
    "lock",
    "collection",
    "prompt",
    "disk",
    "memory",
    "cold cache",
    "slow link",
]


@dataclass(frozen=True)
class Cause:
    """A cause, and the part of the excess that it explains."""

    kind: Kind
    explained_us: float
    text: str


def sentences(step: queries.StepFigures, usual: queries.StepFigures) -> list[str]:
    """The largest part and the likely cause, by the wall clock; on an emulated clock its largest part and cause too."""
    found = []
    if step.times.wall_us < LONGER * usual.times.wall_us:
        found.append("By the wall clock it took as long as usual.")
    else:
        found += [
            _largest(step.times.parts_us, usual.times.parts_us, step.times.wall_us - usual.times.wall_us),
            _sentence(cause_text(step, usual)),
        ]
    if step.times.emulated_us >= LONGER * usual.times.emulated_us > 0:
        excess_us = step.times.emulated_us - usual.times.emulated_us
        text = _largest(step.times.emulated_parts_us, usual.times.emulated_parts_us, excess_us)
        found.append(f"On the emulated clock: {text[0].lower()}{text[1:]}")
        cause = emulated_cause(step, usual)
        named = f"the cause is this: {cause.text}" if cause else "no cause is known"
        found.append(f"On the emulated clock {named}.")
    return found


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def largest_part(parts_us: Mapping[str, float], usual_us: Mapping[str, float]) -> str:
    """Name of the part that grew most."""
    return max(parts_us, key=lambda name: parts_us[name] - usual_us.get(name, 0.0))


def _largest(parts_us: Mapping[str, float], usual_us: Mapping[str, float], excess_us: float) -> str:
    name = largest_part(parts_us, usual_us)
    more_us = parts_us[name] - usual_us.get(name, 0.0)
    share = min(1.0, more_us / excess_us) if excess_us > 0 else 0.0
    return (
        f"Most of the delay is **{PART_NAMES[name]}**: {formats.microseconds(parts_us[name])}, usually "
        f"{formats.microseconds(usual_us.get(name, 0.0))} ({share:.0%} of what the step took longer)."
    )


def cause_text(step: queries.StepFigures, usual: queries.StepFigures) -> str:
    """The likely cause by the wall clock of a step that took longer than usual, or why none is known."""
    found = cause_of(step, usual)
    if found is not None:
        return found.text
    counters = step.counters
    if counters.engine_cpu_us is None and counters.cpu_us is None:
        return "no cause is known: this run did not record CPU time"
    if counters.cpu_us is None:
        return "no cause is known: the kernel's counters of this step were read with a later one"
    if _more(step, usual, "engine_cpu_us") >= _SUPPORTED * (step.times.wall_us - usual.times.wall_us):
        return (
            "no cause is known: its CPU time grew as much with the same work, as when the clock is slower or memory is "
            "shared"
        )
    return "no cause is known: no counter explains the delay"


def cause_of(step: queries.StepFigures, usual: queries.StepFigures) -> Cause | None:
    """The cause that explains most of the excess on the wall clock; None if the step took as long as usual, or nothing
    explains a third of the excess."""
    excess_us = step.times.wall_us - usual.times.wall_us
    if step.times.wall_us < LONGER * usual.times.wall_us:
        return None
    if step.counters.engine_cpu_us is None and step.counters.cpu_us is None:
        return None
    return _most(_Excess(step, usual).causes(), excess_us)


def emulated_cause(step: queries.StepFigures, usual: queries.StepFigures) -> Cause | None:
    """The same on the emulated clock, where only prompts, misses and the link can lengthen a step."""
    excess_us = step.times.emulated_us - usual.times.emulated_us
    if not step.times.emulated_us >= LONGER * usual.times.emulated_us > 0:
        return None
    grown_us = _grown(step.times.emulated_parts_us, usual.times.emulated_parts_us)
    experts_us = sum(grown_us.get(name, 0.0) for name in _EXPERTS)
    usual_us = sum(usual.times.emulated_parts_us.get(name, 0.0) for name in _EXPERTS)
    found = [_of_prompts(step, usual, min(excess_us, _prompt_bound(step, usual, usual.times.emulated_us)))]
    return _most([*found, *_of_experts(step, usual, experts_us, usual_us)], excess_us)


def _most(causes: list[Cause | None], excess_us: float) -> Cause | None:
    found = [each for each in causes if each is not None and each.explained_us >= _SUPPORTED * excess_us]
    return max(found, key=lambda each: each.explained_us, default=None)


def _more(step: queries.StepFigures, usual: queries.StepFigures, name: str, *, steps: float = 1.0) -> float:
    """Growth of a counter above the usual of that many steps; 0 where it was not read."""
    value, before = getattr(step.counters, name), getattr(usual.counters, name)
    return 0.0 if value is None else max(0.0, value - steps * (before or 0.0))


def _grown(parts_us: Mapping[str, float], usual_us: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, us - usual_us.get(name, 0.0)) for name, us in parts_us.items()}


class _Excess:
    """What a step took longer, divided by what the engine's thread did in that time: it computed, it was ready and had
    no core, or it waited."""

    def __init__(self, step: queries.StepFigures, usual: queries.StepFigures) -> None:
        self._step, self._usual = step, usual
        counters = step.counters
        self._is_counted = counters.cpu_us is not None
        self._steps = counters.num_counted_steps or 1.0
        excess_us = step.times.wall_us - usual.times.wall_us
        name = "cpu_us" if counters.engine_cpu_us is None else "engine_cpu_us"
        self._engine_us = min(excess_us, _more(step, usual, name))
        waited_us = max(0.0, self._counted("core_wait_us") - step.earlier_excess_us)
        self._core_us = min(excess_us - self._engine_us, waited_us)
        waited_us = excess_us - self._engine_us - self._core_us
        self._collection_us = min(excess_us, _more(step, usual, "collection_us"))
        in_engine_us = min(self._collection_us, self._engine_us)
        self._computed_us = self._engine_us - in_engine_us
        self._waited_us = max(0.0, waited_us - (self._collection_us - in_engine_us))

    def _counted(self, name: str) -> float:
        return _more(self._step, self._usual, name, steps=self._steps)

    def causes(self) -> list[Cause | None]:
        """All causes with what they explain; what one explains of the thread's waiting is no other's."""
        found: list[Cause | None] = [self._collection(), self._prompts(), *self._experts()]
        if self._is_counted:
            found += [self._no_core(), self._disk(), self._memory(), self._idle()]
        return found

    def _collection(self) -> Cause:
        count = int(self._step.counters.num_full_collections or 0)
        which = {0: "", 1: " (one of all objects)"}.get(count, f" ({count} of all objects)")
        took = formats.microseconds(self._step.counters.collection_us or 0.0)
        return Cause(
            "collection", self._collection_us, f"garbage collection{which}: Python stood still for {took}"
        )

    def _prompts(self) -> Cause | None:
        step, usual = self._step, self._usual
        forward_us = sum(us for name, us in usual.times.parts_us.items() if name not in _PYTHON_PARTS)
        available_us = self._computed_us
        if step.times.parts_us.get("experts_gpu"):
            available_us += self._waited_us  # a device computed
        explained_us = min(available_us, _prompt_bound(step, usual, forward_us))
        return _of_prompts(step, usual, explained_us)

    def _experts(self) -> list[Cause | None]:
        """On a real device, misses and uploads lengthen the wall clock."""
        step, usual = self._step, self._usual
        if step.times.emulated_parts_us or step.num_misses is None:
            return []
        available_us = self._computed_us
        if (usual.counters.engine_cpu_us or 0.0) < _BUSY_ENGINE * usual.times.wall_us:
            available_us += self._waited_us
        grown_us = _grown(step.times.parts_us, usual.times.parts_us)
        experts_us = sum(grown_us.get(name, 0.0) for name in _EXPERTS)
        usual_us = sum(usual.times.parts_us.get(name, 0.0) for name in _EXPERTS)
        return _of_experts(step, usual, min(available_us, experts_us), usual_us)

    def _no_core(self) -> Cause:
        counters = self._step.counters
        # The kernel counts another thread's wait at its end. It may have begun in an earlier step of the same count.
        before_us = (self._steps - 1) * self._usual.times.wall_us + self._step.earlier_excess_us
        of_others_us = min(self._waited_us, max(0.0, self._counted("others_core_wait_us") - before_us))
        switches = self._counted("involuntary_switches")
        pinned = int(counters.num_pinned_threads or 0)
        is_pinned = pinned > (self._usual.counters.num_pinned_threads or 0)
        if is_pinned or (counters.core_wait_us is None and switches >= 1):  # a wait goes on, or has no times
            of_others_us = self._waited_us
        explained_us = self._core_us + of_others_us
        self._waited_us = max(0.0, self._waited_us - of_others_us)
        how_long = "" if counters.core_wait_us is None else f" for {formats.microseconds(explained_us)}"
        if is_pinned:
            threads = "a computing thread was" if pinned == 1 else f"{pinned} computing threads were"
            text = f"{threads} pinned to fewer cores than at the start, and waited{how_long} for one"
            return Cause("pinned thread", explained_us, text)
        if self._python_us() >= 0.5 * explained_us > 0:
            return self._own_threads(explained_us)
        times = f" and took one away {round(switches):,} times" if switches >= 1.5 else ""
        text = f"another process: a thread was ready and had no core{how_long}; the kernel gave it to others{times}"
        return Cause("busy core", explained_us, text)

    def _python_us(self) -> float:
        """CPU time of Python's other threads, at least."""
        return max(0.0, self._counted("others_cpu_us") - _TICK_US)

    def _own_threads(self, waited_us: float) -> Cause:
        """Python's other threads computed: where the engine's is in Python, it waits for the interpreter's lock."""
        waited = formats.microseconds(waited_us)
        part = largest_part(self._step.times.parts_us, self._usual.times.parts_us)
        if part in _PYTHON_PARTS:
            text = f"another thread of the server held the interpreter's lock: the engine's waited {waited} for it"
            return Cause("lock", waited_us, text)
        text = f"the server's own other threads computed, and the engine's waited {waited}"
        return Cause("own threads", waited_us, text)

    def _disk(self) -> Cause:
        pages = self._counted("major_faults")
        explained_us = min(self._waited_us, pages * _DISK_READ_US) + min(
            self._computed_us, pages * 100 * _MAPPING_US
        )
        self._waited_us = max(0.0, self._waited_us - explained_us)
        count = f"{round(pages):,} pages were" if pages >= 1.5 else "one page was"
        return Cause(
            "disk", explained_us, f"{count} read from disk in this step: the page cache had lost them"
        )

    def _memory(self) -> Cause:
        pages = self._counted("minor_faults")
        text = (
            f"{round(pages):,} pages of memory were mapped: they are new, or the kernel had taken them back"
        )
        return Cause("memory", min(self._computed_us, pages * _MAPPING_US), text)

    def _idle(self) -> Cause | None:
        if self._python_us() >= 0.5 * self._waited_us > 0:
            return self._own_threads(self._waited_us)
        if self._counted("cpu_us") - self._engine_us >= 0.5 * self._waited_us:
            return None  # the process ran: which thread it was is too short to tell
        waited = formats.microseconds(self._waited_us)
        text = (
            f"the process did not run for {waited}: it was stopped, or it waited, and no core was taken away"
        )
        return Cause("stopped", self._waited_us, text)


def _prompt_bound(step: queries.StepFigures, usual: queries.StepFigures, usual_us: float) -> float:
    """The most that further prompt tokens can explain: as much each as a usual token."""
    extra = max(0.0, step.num_prefill_tokens - usual.num_prefill_tokens)
    return usual_us * extra / max(1.0, usual.num_prefill_tokens + usual.num_decode_tokens)


def _of_prompts(step: queries.StepFigures, usual: queries.StepFigures, explained_us: float) -> Cause | None:
    if step.num_prefill_tokens <= usual.num_prefill_tokens:
        return None
    count = int(step.num_prefill_tokens)
    return Cause("prompt", explained_us, f"prompts: {count:,} prompt tokens were computed in the same step")


def _of_experts(
    step: queries.StepFigures, usual: queries.StepFigures, grown_us: float, usual_us: float
) -> list[Cause | None]:
    """What the experts took longer: as much for each further miss as one usually takes; the link took the rest.

    usual_us: the usual time of all experts.
    """
    if step.num_misses is None or usual.num_misses is None:
        return []
    tokens = step.num_prefill_tokens + step.num_decode_tokens
    usually = usual.num_misses * tokens / max(1.0, usual.num_prefill_tokens + usual.num_decode_tokens)
    more = max(0.0, step.num_misses - usually)
    of_misses_us = min(grown_us, more * usual_us / max(1.0, usual.num_misses))
    misses = f"{int(step.num_misses):,} routed experts were not on the GPU, usually {usually:,.0f}"
    copied = f"{formats.size(step.upload_bytes or 0)} were uploaded, usually {formats.size(usual.upload_bytes or 0)}"
    found: list[Cause | None] = [
        Cause("cold cache", of_misses_us, f"more misses, as with a cold cache: {misses}"),
    ]
    if step.upload_bytes or usual.upload_bytes:
        text = f"the link was slow or busy: {copied}; {misses}, which explains less"
        found.append(Cause("slow link", grown_us - of_misses_us, text))
    return found
