"""The clock of a run, and the clock that measures the parts of a step.

A step is measured by wall time at phase boundaries and by readings of clocks kept by native code. Every clock is read
twice per step; without telemetry only the wall clock. `types.StepParts` defines the parts.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from twofold.api.types import Clock, EmulatedParts, StepParts
from twofold.blocks import ops
from twofold.engine.step_counters import CounterReader, StepCounters
from twofold.experts.moe import MoeRuntime
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.runner import Runner


class RunClock:
    """Seconds since the engine was made. Any thread may call `now_s`, only the engine's thread `read`."""

    def __init__(self, moe: MoeRuntime, clock: Clock, drafter: ModelDrafter | None = None) -> None:
        """drafter: its time is part of a virtual clock."""
        self.is_virtual = clock == "virtual"
        self._drafter = drafter
        self._moe = moe
        self._started_s = time.perf_counter()
        self._virtual_s = 0.0

    def read(self) -> float:
        """Read the clock now."""
        if self.is_virtual:
            drafting_s = 0.0 if self._drafter is None else self._drafter.unclocked_s
            self._virtual_s = (self._moe.virtual_now_us or 0.0) * 1e-6 + drafting_s
        return self.now_s()

    def now_s(self) -> float:
        """The time now; on a virtual clock, the time last read."""
        return self._virtual_s if self.is_virtual else time.perf_counter() - self._started_s


class _Reading(NamedTuple):
    """Readings of monotonic clocks. A named tuple with plain arithmetic: a step of a small model takes 700 µs, and
    dictionaries and dataclasses cost it 50 of them."""

    wall_s: float = 0.0
    batch_s: float = 0.0
    sampling_s: float = 0.0
    work_us: tuple[float, float, float, float, float, float] = (0.0,) * 6
    clock_us: tuple[float, float, float, float, float] = (0.0,) * 5


_NOTHING_PLACED: Final = (0, 0, 0)


class StepClock:
    """Step timer of one engine; its thread calls `begin`, `scheduled`, `computed`, `end` and `recorded`, in this
    order."""

    def __init__(self, runner: Runner, *, enabled: bool) -> None:
        self._runner = runner
        self._enabled = enabled
        self._virtual = runner.moe.virtual_now_us is not None
        self._on_device = runner.moe.accelerator is not None
        self._began_s = self._ended_s = self._telemetry_s = 0.0
        self._computing_s = 0.0
        self._scheduled = self._computed = _Reading()
        self._counters = CounterReader() if enabled else None
        self._placed_by: object = None
        self._placed = _NOTHING_PLACED

    def begin(self) -> None:
        """Start a step, before requests are taken in."""
        self._began_s = time.perf_counter()
        if self._counters is not None:
            self._counters.begin()

    def counters(self) -> StepCounters:
        """The counters since those of the step before; call it once, after `end`."""
        if self._counters is None:
            return StepCounters()
        return self._counters.read(self._ended_s - self._began_s + self._telemetry_s, self._ended_s)

    def placed(self) -> tuple[int | None, int | None, int | None]:
        """Misses, fetched experts and uploaded bytes of the step; call it once per step. None without slots."""
        if not (self._virtual or self._on_device):
            return None, None, None
        executor = self._runner.moe.executor
        counts = executor.counts()
        before = self._placed if executor is self._placed_by else _NOTHING_PLACED
        fetched = counts["fetched"]
        now = self._placed = counts["cpu_misses"] + fetched, fetched, counts["h2d_bytes"]
        self._placed_by = executor
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def compute_begins(self) -> None:
        """Start the time that `compute_s` measures."""
        self._computing_s = time.perf_counter() if self._on_device else time.thread_time()

    def compute_s(self) -> float:
        """Time since `compute_begins`. Without an accelerator it is CPU time of the engine's thread, which shares the
        work of every operation: other processes on the machine do not lengthen it."""
        return (time.perf_counter() if self._on_device else time.thread_time()) - self._computing_s

    def idle(self) -> None:
        """End a step without work; the recording time of the previous step is dropped."""
        self._telemetry_s = 0.0
        if self._counters is not None:
            self._counters.pause()

    def scheduled(self) -> None:
        if self._enabled:
            self._scheduled = self._read()

    def computed(self) -> None:
        if self._enabled:
            self._computed = self._read()

    def end(self) -> float:
        """End the step after its answers were delivered. Returns its wall time, plus the recording time of the previous
        step."""
        self._ended_s = time.perf_counter()
        return self._ended_s - self._began_s + self._telemetry_s

    def recorded(self) -> None:
        """The step has been recorded; the next step is charged with that time."""
        self._telemetry_s = time.perf_counter() - self._ended_s

    def parts(self) -> tuple[StepParts, EmulatedParts | None]:
        """Parts of the finished step, on the wall clock and on a virtual one."""
        begin, end = self._scheduled, self._computed
        work0, work1 = begin.work_us, end.work_us
        clock0, clock1 = begin.clock_us, end.clock_us
        embed, attention = work1[0] - work0[0], work1[1] - work0[1]
        router, dense_ffn = work1[2] - work0[2], work1[3] - work0[3]
        experts, head = work1[4] - work0[4], work1[5] - work0[5]
        sampling = 1e6 * (end.sampling_s - begin.sampling_s)
        experts_gpu = 0.0
        emulated = None
        if self._virtual:
            emulated = EmulatedParts(*(after - before for before, after in zip(clock0, clock1, strict=True)))
        elif self._on_device:
            attention, experts_gpu, experts = (clock1[i] - clock0[i] for i in range(3))
            embed = router = dense_ffn = 0.0
            forward = 1e6 * (end.wall_s - begin.wall_s)
            head = max(forward - sampling - attention - experts_gpu - experts, 0.0)
        parts = StepParts(  # positional: keywords take 0.7 us of a step
            1e6 * (begin.wall_s - self._began_s),
            1e6 * (end.batch_s - begin.batch_s),
            embed,
            attention,
            router,
            dense_ffn,
            experts,
            experts_gpu,
            head,
            sampling,
            1e6 * (self._ended_s - end.wall_s),
            1e6 * self._telemetry_s,
        )
        return parts, emulated

    def _read(self) -> _Reading:
        runner = self._runner
        # Only virtual and device clocks have parts.
        clock_us = runner.moe.clock_parts() if self._virtual or self._on_device else (0.0,) * 5
        return _Reading(time.perf_counter(), runner.batch_s, runner.sampling_s, ops.work_of_parts(), clock_us)
