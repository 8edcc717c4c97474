"""CPU kernel levels that the tests can and cannot run on this machine."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable

from twofold._testing import kernels
from twofold.api.errors import ConfigError
from twofold.blocks import ops

EMULATIONS = {"amx": "amx_emulated"}
"""Emulated kernels by level: their instructions run as plain code, for CPUs without them."""


def _runs(level: str) -> bool:
    try:
        kernels.format_kernel(level, "bf16")
    except ConfigError:
        return False
    return True


def runnable() -> list[str]:
    """Levels of this CPU, best last, then the emulations that it can run."""
    return [*kernels.supported_levels(), *filter(_runs, EMULATIONS.values())]


def own_kernels(levels: Iterable[str], formats: Iterable[str]) -> list[tuple[str, str]]:
    """Each level with each format of which it has a kernel of its own; tests of the others would repeat these."""
    pairs = itertools.product(levels, list(formats))
    return [(level, name) for level, name in pairs if kernels.format_kernel(level, name)[1] == level]


def chosen(format: str) -> str:
    """The level whose products of this format run here: the best one, or the one that was measured the fastest."""
    best, reason = ops.isa_choice()
    for level, formats in re.findall(r"(\w+) for ([\w, ]+)", reason):
        if format in formats.split(", "):
            return str(level)
    return best


def summary(levels: list[str], runnable: list[str]) -> str:
    """One line: the levels whose kernels no test runs here, and those that are tested emulated only."""
    emulated = [level for level in levels if level not in runnable and EMULATIONS.get(level) in runnable]
    missing = [level for level in levels if level not in runnable and level not in emulated]
    line = f"kernel levels not tested on this CPU: {', '.join(missing) or 'none'}"
    return line + (f"; emulated only: {', '.join(emulated)}" if emulated else "")


def over(name: str, values: Iterable[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for every value of one argument, within one case: thousands of cases that take microseconds cost more
    than what they test. A failure names the value."""
    every = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: object) -> None:
            for value in every:
                try:
                    test(**given, **{name: value})
                except Exception as error:
                    error.add_note(f"{name} = {value!r}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
