"""Which levels of the CPU kernels the tests can run on this machine, and which they cannot."""

from __future__ import annotations

from twofold._core.testing import kernels
from twofold.api.errors import ConfigError

EMULATIONS = {"amx": "amx_emulated"}
"""By level: its kernels with their instructions carried out in plain code, for CPUs without them."""


def _runs(level: str) -> bool:
    try:
        kernels.format_kernel(level, "bf16")
    except ConfigError:
        return False
    return True


def runnable() -> list[str]:
    """Levels of this CPU, best last, then the emulations that it can run."""
    return [*kernels.supported_levels(), *filter(_runs, EMULATIONS.values())]


def summary(levels: list[str], runnable: list[str]) -> str:
    """One line: the levels whose kernels no test runs here, and those that are tested emulated only."""
    emulated = [level for level in levels if level not in runnable and EMULATIONS.get(level) in runnable]
    missing = [level for level in levels if level not in runnable and level not in emulated]
    line = f"kernel levels not tested on this CPU: {', '.join(missing) or 'none'}"
    return line + (f"; emulated only: {', '.join(emulated)}" if emulated else "")
