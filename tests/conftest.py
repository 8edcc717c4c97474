"""Hooks for all tests: a time limit for each, and a summary of what was skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Generator, Iterator
from signal import ITIMER_REAL, SIGALRM, setitimer, signal  # by name: tests replace `signal.signal`
from types import FrameType

import pytest

TIME_LIMIT_S = 300
"""Time limit for set-up, call and tear-down of a test, each. A test of `make test` takes less than ten seconds."""
SLOW_TIME_LIMIT_S = 580
"""The same for tests marked `slow`; just below faulthandler_timeout, which ends the process."""
REPEAT_S = 20
"""Seconds after which an expired limit is raised again: the test's own cleanup may wait, too."""


class TimeLimitError(BaseException):
    """A test exceeded its time limit. No Exception: neither the test nor hypothesis may catch it and go on."""


def thread_stacks() -> str:
    """The stack of every Python thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


@contextlib.contextmanager
def time_limit(item: pytest.Item) -> Iterator[None]:
    """Raise TimeLimitError in the main thread once the test's limit is exceeded.

    Native code that never returns is not interrupted; faulthandler_timeout then ends the process.
    """
    limit_s = SLOW_TIME_LIMIT_S if item.get_closest_marker("slow") else TIME_LIMIT_S

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeLimitError(f"{item.nodeid} ran longer than {limit_s} s\n{thread_stacks()}")

    before = signal(SIGALRM, expire)
    setitimer(ITIMER_REAL, limit_s, REPEAT_S)
    try:
        yield
    finally:
        setitimer(ITIMER_REAL, 0)
        signal(SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with time_limit(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with time_limit(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    with time_limit(item):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A green result says what it left out: skips by their reason, and of which kernels it knows nothing."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        reported = (
            f"{reason.removeprefix('Skipped: ')} ({count})" for reason, count in reasons.most_common()
        )
        terminalreporter.write_line(f"skipped: {'; '.join(reported)}")
    if importlib.util.find_spec("twofold._testing") is None:
        return
    from twofold._testing import kernels

    from tests.kernels import kernel_levels

    terminalreporter.write_line(kernel_levels.summary(kernels.levels(), kernel_levels.runnable()))
