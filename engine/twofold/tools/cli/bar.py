"""A progress bar: one line on a terminal's stderr, rewritten in place. Elsewhere a server logs a slow start."""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

_BAR_CHARS: Final = 30
_FIRST_LOG_S: Final = 10.0
"""When the first line is logged; each further one after twice the time."""


class Bar:
    """Removed from the terminal when its `with` block ends."""

    def __init__(self, what: str, unit: str, scale: float) -> None:
        """`scale`: displayed units (`unit`) per unit of `show`'s numbers; without a unit, only the share is shown."""
        self._what, self._unit, self._scale = what, unit, scale
        self._shows = sys.stderr.isatty()
        self._percent = -1
        self._begin_s = time.monotonic()
        self._log_at_s = _FIRST_LOG_S

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, done: int, total: int, stage: str = "") -> None:
        """`stage`: the current stage's name, if there are several."""
        percent = min(100, 100 * done // max(1, total))
        if not self._shows:
            self._log(percent, stage)
        if not self._shows or percent == self._percent:
            return
        self._percent = percent
        filled = "█" * (percent * _BAR_CHARS // 100)
        amount = f"  {done * self._scale:.4g}/{total * self._scale:.4g} {self._unit}" if self._unit else ""
        what = f"{self._what} {stage:<13}" if stage else self._what
        line = f"{what} {filled:<{_BAR_CHARS}} {percent:3d} %{amount}"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def _log(self, percent: int, stage: str) -> None:
        seconds = time.monotonic() - self._begin_s
        if seconds >= self._log_at_s:
            self._log_at_s *= 2
            what = f"{self._what} {stage}".rstrip()
            fields = {"event": "slow start", "stage": stage, "percent": percent, "seconds": round(seconds, 1)}
            text = "still %s after %.0f s: %d %%"
            logging.getLogger("twofold.server").info(text, what, seconds, percent, extra={"fields": fields})
