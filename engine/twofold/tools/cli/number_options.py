"""Command-line options that take numbers within limits, so that every run ends."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from twofold.api.sampling_ranges import Range


def within(parse: Callable[[str], float], allowed: Range) -> Callable[[str], Any]:
    """An argparse type: a number that `parse` reads, within limits."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if allowed.holds(value := parse(text)):
                return value
        kind = "whole number" if parse is int else "number"
        raise argparse.ArgumentTypeError(f"{text!r} was given; a {kind} from {allowed} is expected")

    return read


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number within limits."""
    return within(int, Range(low, high))


def number(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number within limits."""
    return within(float, Range(low, high))


def several(parse_one: Callable[[str], int]) -> Callable[[str], list[int]]:
    """An argparse type: values separated by commas."""
    return lambda text: [parse_one(part) for part in text.split(",")]


Option = tuple[str, str, Callable[[str], Any], Any, str]
"""(flag, metavar, type, default, help); the help of an option with a default ends with it."""


def add_options(group: Any, options: Sequence[Option]) -> None:
    """Add options to a parser or an argument group."""
    for flag, metavar, parse, default, help_text in options:
        shown = ",".join(map(str, default)) if isinstance(default, list) else f"{default}"
        full_help = help_text if default is None else f"{help_text} (default: {shown})"
        group.add_argument(flag, type=parse, default=default, metavar=metavar, help=full_help)


def cpu_threads_option() -> Option:
    """--cpu-threads of commands that load no engine."""
    return (
        "--cpu-threads",
        "N",
        whole(0, 1024),
        0,
        "threads that compute on the CPU; 0: one per physical core",
    )
