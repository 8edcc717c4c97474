"""What the kernel and the interpreter did in a step: processor time, waits for a core, page faults, collections.

The CPU time of the engine's thread and garbage collections are read after every step. What has to be asked of every
thread takes 80 us: it is read after a step that took longer than usual, else after _MOST_STEPS steps, and only as
often as costs a small share of the time.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
import weakref
from typing import Any, Final, NamedTuple

_MOST_STEPS: Final = 32
"""Steps after which the counters are read in any case, so that readings show what is usual."""
_LONGER: Final = 1.15
"""Ratio to the usual time from which all counters are read; a page looks for causes from there on."""
_LONG_S: Final = 5e-3
"""Slow steps from here on are always counted: they do not feel it."""
_BUDGET: Final = 0.005
"""Share of the time that counting shorter steps may take."""
_MOST_BUDGET_S: Final = 400e-6
"""Counting time that steps as usual save for slow ones."""
_TRACKING: Final = 0.02
"""The usual time is a running median: it moves by this ratio towards every step."""


class StepCounters(NamedTuple):
    """Counters of one step; the fields of `StepRecord` of the same names, in its order."""

    involuntary_switches: int | None = None
    major_faults: int | None = None
    cpu_us: float | None = None
    engine_cpu_us: float | None = None
    collection_us: float | None = None
    num_full_collections: int | None = None
    num_counted_steps: int | None = None
    minor_faults: int | None = None
    voluntary_switches: int | None = None
    core_wait_us: float | None = None
    others_core_wait_us: float | None = None
    others_cpu_us: float | None = None
    num_pinned_threads: int | None = None


_UNKNOWN: Final = StepCounters()
_NOT_COLLECTED: Final = (0.0, 0)
_BEFORE: Final = _UNKNOWN[:3]
_AFTER: Final = _UNKNOWN[6:]
"""Fields before and after the step's own, which have no values where they were not counted."""


class _Collections:
    """Garbage collections of the process; they stop every thread that runs Python."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.num_full = 0
        self._began_s = 0.0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
            return
        self.spent_s += time.perf_counter() - self._began_s
        self.num_full += info["generation"] == 2


_collections: _Collections | None = None


def _watch_collections() -> _Collections:
    """The process's one watch; it begins with the first engine that records."""
    global _collections
    _collections = _collections or _Collections()
    return _collections


class _ThreadTimes(NamedTuple):
    """Times without a core: of the engine's thread, and the longest of another one. CPU time of the pool's threads."""

    core_wait_us: float | None
    others_core_wait_us: float | None
    pool_cpu_us: float


class _Threads:
    """The process's threads: how long each was ready and had no core, and which cores the computing ones may use.

    Native threads are the pool's. A thread of Python may hold the interpreter's lock while it has no core. Without
    Linux's /proc there are no threads here.
    """

    def __init__(self) -> None:
        self._engine = threading.get_native_id()
        self._python = {thread.native_id for thread in threading.enumerate()} - {self._engine}
        self._files: dict[int, int] = {}
        self._last_ns: dict[int, tuple[int, int]] = {}
        self._num_cores: dict[int, int] = {}
        opened: list[int] = []
        weakref.finalize(self, _close, opened)
        for thread in self._all():
            try:
                self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
                opened.append(self._files[thread])
                if thread not in self._python:
                    self._num_cores[thread] = len(os.sched_getaffinity(thread))
            except OSError:  # it has ended, or the kernel does not count
                continue
        self._engine_file = self._files.pop(self._engine, None)
        self._late_ns = 0
        self.read(time.perf_counter())

    @staticmethod
    def _all() -> set[int]:
        try:
            return {int(name) for name in os.listdir("/proc/self/task")}
        except OSError:
            return set()

    def read(self, ended_s: float) -> _ThreadTimes:
        """The times of all threads since the last call, for a step that ended at `ended_s` of `time.perf_counter`.

        The kernel likes to take a core away at a system call, so often in this reading. That is the next step's: the
        time up to here is part of its wall time.
        """
        longest_ns: int | None = None
        computed_ns = 0
        for thread, file in self._files.items():
            if (found := self._since_last(thread, file)) is not None:
                computed_ns += 0 if thread in self._python else found[0]
                longest_ns = found[1] if longest_ns is None else max(longest_ns, found[1])
        pool_us, longest_us = computed_ns * 1e-3, _microseconds(longest_ns)
        late_ns = int(1e9 * (time.perf_counter() - ended_s))
        found = None if self._engine_file is None else self._since_last(self._engine, self._engine_file)
        if found is None:
            return _ThreadTimes(None, longest_us, pool_us)
        waited_ns = found[1] + self._late_ns
        self._late_ns = min(found[1], late_ns)
        return _ThreadTimes(_microseconds(waited_ns - self._late_ns), longest_us, pool_us)

    def _since_last(self, thread: int, file: int) -> tuple[int, int] | None:
        """Nanoseconds that a thread ran, and that it waited for a core; None if it has ended."""
        try:
            ran_ns, waited_ns = map(int, os.pread(file, 64, 0).split()[:2])
        except (OSError, ValueError):
            return None
        before = self._last_ns.get(thread, (ran_ns, waited_ns))
        self._last_ns[thread] = ran_ns, waited_ns
        return ran_ns - before[0], waited_ns - before[1]

    def num_pinned(self) -> int | None:
        """Threads that may use fewer cores than when the engine began."""
        count: int | None = None
        for thread, num_cores in self._num_cores.items():
            try:
                now = len(os.sched_getaffinity(thread))
            except OSError:
                continue
            count = (count or 0) + (now < num_cores)
        return count


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _microseconds(ns: int | None) -> float | None:
    return None if ns is None else ns * 1e-3


class _Sums(NamedTuple):
    """Sums since the process began, at the last count."""

    process: resource.struct_rusage
    thread: resource.struct_rusage

    @classmethod
    def now(cls) -> _Sums:
        return cls(resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_THREAD))


class CounterReader:
    """Reads an engine's counters; only its thread calls it."""

    def __init__(self) -> None:
        self._collections = _watch_collections()
        self._threads: _Threads | None = None
        self._thread_id = 0
        self._is_paused = True
        self._sums = _Sums.now()
        self._engine_s = self._collection_s = 0.0
        self._num_full = 0
        self._num_steps = 0
        self._usual_s = 0.0
        self._budget_s = _MOST_BUDGET_S

    def begin(self) -> None:
        """A step begins; counting begins here after a pause or in another thread."""
        if not self._is_paused and threading.get_ident() == self._thread_id:
            return
        if self._threads is None or threading.get_ident() != self._thread_id:
            self._thread_id, self._threads = threading.get_ident(), _Threads()
        self._is_paused = False
        self._num_steps = 0
        self._sums = _Sums.now()
        self._threads.read(time.perf_counter())
        self._collected()
        self._engine_s = time.thread_time()

    def pause(self) -> None:
        """The engine has nothing to do: what happens until the next step is no step's."""
        self._is_paused = True

    def read(self, wall_s: float, ended_s: float) -> StepCounters:
        """The counters since the last step, for a step that took `wall_s` and ended at `ended_s`."""
        if self._is_paused or self._threads is None:
            return _UNKNOWN
        engine_s, before_s = time.thread_time(), self._engine_s
        self._engine_s = engine_s
        self._num_steps += 1
        collected = _NOT_COLLECTED if self._collections.spent_s == self._collection_s else self._collected()
        usual_s = self._usual_s or wall_s
        self._usual_s = usual_s * (1 + _TRACKING if wall_s > usual_s else 1 - _TRACKING)
        self._budget_s += _BUDGET * wall_s
        is_slow = wall_s > _LONGER * usual_s
        is_due = (is_slow or self._num_steps >= _MOST_STEPS) and (self._budget_s > 0 or wall_s > _LONG_S)
        if not is_due:
            # A call of StepCounters takes 3 us.
            return StepCounters._make((*_BEFORE, 1e6 * (engine_s - before_s), *collected, *_AFTER))
        counted = self._count(self._threads, ended_s, is_slow=is_slow)
        return StepCounters._make((*counted[:3], 1e6 * (engine_s - before_s), *collected, *counted[3:]))

    def _collected(self) -> tuple[float, int]:
        """Microseconds of garbage collection since the last call, and how many were of all objects."""
        before, now = (self._collection_s, self._num_full), self._collections
        self._collection_s, self._num_full = now.spent_s, now.num_full
        return 1e6 * (now.spent_s - before[0]), now.num_full - before[1]

    def _count(self, threads: _Threads, ended_s: float, *, is_slow: bool) -> tuple[Any, ...]:
        """Counters of all threads since the last count: those of `StepCounters` before and after the step's own."""
        before, now = self._sums, _Sums.now()
        num_steps, self._sums, self._num_steps = self._num_steps, now, 0
        cpu_us = _cpu_us(before.process, now.process)
        num_pinned = threads.num_pinned() if is_slow else None
        times = threads.read(ended_s)
        spent_s = min(_MOST_BUDGET_S, time.perf_counter() - ended_s)  # it may have lost its core
        self._budget_s = min(_MOST_BUDGET_S, self._budget_s) - spent_s
        return (
            now.process.ru_nivcsw - before.process.ru_nivcsw,
            now.process.ru_majflt - before.process.ru_majflt,
            cpu_us,
            num_steps,
            now.process.ru_minflt - before.process.ru_minflt,
            now.thread.ru_nvcsw - before.thread.ru_nvcsw,
            times.core_wait_us,
            times.others_core_wait_us,
            max(0.0, cpu_us - _cpu_us(before.thread, now.thread) - times.pool_cpu_us),
            num_pinned,
        )


def _cpu_us(before: resource.struct_rusage, now: resource.struct_rusage) -> float:
    return 1e6 * (now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime)
