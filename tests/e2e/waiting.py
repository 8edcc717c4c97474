"""Bounded waits: a condition that does not come true and a process that does not end fail their test."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator


def wait_until(condition: Callable[[], object], *, limit_s: float = 60.0) -> None:
    """Poll `condition` until it is true; TimeoutError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the condition did not come true within {limit_s:.0f} s")
        time.sleep(0.01)


@contextlib.contextmanager
def killed_at_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill `process` however the block ends. Popen alone waits for it, also after a failed assertion."""
    with process:
        try:
            yield process
        finally:
            process.kill()
