"""Runs checks in order on a thread of their own, within a time limit; a check that never returns is abandoned."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from twofold.api.errors import KernelError

Figures = Mapping[str, Any]
State = Literal["passed", "failed", "stuck", "not run"]


class WrongResultError(KernelError):
    """A device computed something else than the CPU."""


class NotAvailableError(Exception):
    """The device lacks what a check is about, which is no failure."""


@dataclass(frozen=True)
class Check:
    """A named check. `run` returns what it measured, raises NotAvailableError if there is nothing to check, and any
    other exception if the device is not usable."""

    name: str
    run: Callable[[], Figures]


@dataclass(frozen=True)
class CheckResult:
    name: str
    state: State
    problem: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class CheckLimits:
    start_within_s: float
    """Checks that have not started by then are not run."""
    stuck_after_s: float
    """A check that has not returned by then is stuck: no later check is run, and its thread is abandoned."""
    stops_at_failure: bool


SHORT: Final = CheckLimits(start_within_s=2.0, stuck_after_s=10.0, stops_at_failure=True)
"""For the self-check: the first use of a device loads its kernels, which may take seconds."""
LONG: Final = CheckLimits(start_within_s=600.0, stuck_after_s=60.0, stops_at_failure=False)


def run_checks(checks: Sequence[Check], limits: CheckLimits) -> list[CheckResult]:
    """A result for each check, in order.

    An abandoned thread keeps everything that the stuck check uses: freeing a device's memory would wait for it, too.
    """
    results: queue.SimpleQueue[CheckResult] = queue.SimpleQueue()
    deadline = time.monotonic() + limits.start_within_s
    abandoned = threading.Event()

    def run_all() -> None:
        for check in checks:
            if abandoned.is_set():
                return
            if time.monotonic() > deadline:
                problem = f"the {limits.start_within_s:g} s for all checks were over"
                results.put(CheckResult(check.name, "not run", problem))
                continue
            result = _run(check)
            results.put(result)
            if result.state == "failed" and limits.stops_at_failure:
                return

    threading.Thread(target=run_all, name="twofold-device-check", daemon=True).start()
    found: list[CheckResult] = []
    for check in checks:
        try:
            found.append(results.get(timeout=limits.stuck_after_s))
        except queue.Empty:
            abandoned.set()
            problem = f"it has not finished within {limits.stuck_after_s:g} s"
            found.append(CheckResult(check.name, "stuck", problem, seconds=limits.stuck_after_s))
        if found[-1].state == "stuck" or (found[-1].state == "failed" and limits.stops_at_failure):
            break
    why = "an earlier check failed"
    return [*found, *(CheckResult(check.name, "not run", why) for check in checks[len(found) :])]


def _run(check: Check) -> CheckResult:
    began = time.perf_counter()

    def seconds() -> float:
        return round(time.perf_counter() - began, 4)

    try:
        return CheckResult(check.name, "passed", figures=check.run(), seconds=seconds())
    except NotAvailableError as error:
        return CheckResult(check.name, "not run", str(error), seconds=seconds())
    except Exception as error:  # whatever a broken device raises is a failed check
        lines = str(error).splitlines() or [""]
        problem = lines[0] if isinstance(error, KernelError) else f"{type(error).__name__}: {lines[0]}"
        return CheckResult(check.name, "failed", problem, seconds=seconds())
