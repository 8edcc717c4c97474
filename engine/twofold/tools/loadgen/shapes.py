"""Shapes of a load over time: constant, ramp, step, spike and soak, each made of named stages.

A level is a number of users (closed loop) or of conversations per second (open loop).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from twofold.tools.loadgen.arrivals import arrival_times


@dataclass(frozen=True)
class Stage:
    """A part of the load whose level changes linearly from `begin_level` to `end_level`."""

    name: str
    begin_s: float
    end_s: float
    begin_level: float
    end_level: float

    def level_at(self, at_s: float) -> float:
        done = (at_s - self.begin_s) / (self.end_s - self.begin_s)
        return self.begin_level + (self.end_level - self.begin_level) * done


Part = tuple[str, float, float, float]
"""(name, share of the time, level at its beginning, level at its end), levels relative to the highest."""

SHAPES: Final[dict[str, tuple[Part, ...]]] = {
    "constant": (("constant", 1.0, 1.0, 1.0),),
    "ramp": (("ramp", 0.8, 0.0, 1.0), ("hold", 0.2, 1.0, 1.0)),
    "step": tuple((f"step {share:.0%}", 0.25, share, share) for share in (0.25, 0.5, 0.75, 1.0)),
    "spike": (("before", 0.4, 0.2, 0.2), ("spike", 0.2, 1.0, 1.0), ("after", 0.4, 0.2, 0.2)),
    "soak": tuple((f"soak {number}", 0.25, 1.0, 1.0) for number in (1, 2, 3, 4)),
}
"""Stages of each shape. `soak` is a constant load in four equal stages, so that a drift shows between them."""


def stages(shape: str, highest: float, seconds: float) -> tuple[Stage, ...]:
    """The stages of `shape`, a key of SHAPES, scaled to a level and a duration."""
    found: list[Stage] = []
    begin_s = 0.0
    for name, share, begin, end in SHAPES[shape]:
        found.append(Stage(name, begin_s, begin_s + share * seconds, begin * highest, end * highest))
        begin_s += share * seconds
    return tuple(found)


def stage_at(plan: tuple[Stage, ...], at_s: float) -> Stage | None:
    """The stage at `at_s`; None before the first or after the last."""
    return next((stage for stage in plan if stage.begin_s <= at_s < stage.end_s), None)


def poisson_arrivals(plan: tuple[Stage, ...], seed: int) -> Iterator[float]:
    """Arrival times of a Poisson process whose rate follows the stages, in seconds.

    Thinning: arrivals at the highest rate are kept with the probability level / highest.
    """
    highest = max(max(stage.begin_level, stage.end_level) for stage in plan)
    draw = random.Random(f"{seed}/thinning")  # noqa: S311  the same arrivals for the same seed
    for at_s in arrival_times(highest, 1.0, seed):
        stage = stage_at(plan, at_s)
        if stage is None:
            return
        if draw.random() * highest < stage.level_at(at_s):
            yield at_s


def user_count(plan: tuple[Stage, ...], at_s: float) -> int | None:
    """Users at `at_s`, at least one; None after the end."""
    stage = stage_at(plan, at_s)
    return None if stage is None else max(1, round(stage.level_at(at_s)))
