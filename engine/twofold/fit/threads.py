"""Number of CPU threads, by a measurement of at most two seconds instead of a count of cores; cached per machine."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.api.regular_file import read_regular_text
from twofold.api.whole_file import whole_file
from twofold.blocks import ops
from twofold.experts.calibration import LayerTimer
from twofold.experts.profiles import local_profile_path
from twofold.experts.slot_plan import MoeShape

_BUDGET_S: Final = 2.0
_BUSY_SHARE: Final = 0.5
"""Load per core above which a measurement would show other programs."""
_GAIN: Final = 1.05
"""More or fewer threads than cores must be this many times as fast."""
_SHAPE: Final = MoeShape(1, 32, 8, 2048, 768, (("q4_0", "q4_0", "q4_0"),))
_DECODE: Final = (1,) * _SHAPE.top_k
_PREFILL: Final = (16,) * _SHAPE.num_experts


@dataclass(frozen=True)
class ThreadChoice:
    """Chosen number of threads, and the measurement behind it."""

    count: int
    us: dict[int, float]
    """Threads → time of a decode layer plus a prefill layer's share, in microseconds."""

    @property
    def reason(self) -> str:
        if not self.us:
            return "one per physical core; other programs are running, so nothing was measured"
        shown = ", ".join(f"{count}: {us:.0f} us" for count, us in sorted(self.us.items()))
        return f"fastest of a measured expert layer ({shown})"


def choose(us: dict[int, float], cores: int) -> int:
    """`cores`, unless another count is clearly faster."""
    best = min(us, key=lambda count: us[count])
    return best if cores not in us or us[cores] > _GAIN * us[best] else cores


def candidates(cores: int, logical: int) -> list[int]:
    """Half the cores, the cores less one, the cores, and all hardware threads."""
    return sorted({count for count in (cores // 2, cores - 1, cores, logical) if count >= 1})


def measured_threads(path: Path | None = None) -> ThreadChoice:
    """The number of threads for this machine: from `path` (default: beside the machine's profile), else measured."""
    path = path or local_profile_path().with_name("threads.json")
    cores, logical = ops.ThreadPool(0).num_threads, len(os.sched_getaffinity(0))
    key = f"{platform.node()} {cores} of {logical} {ops.isa_choice()[0]}"
    known = _read(path, key)
    if known is not None:
        return ThreadChoice(choose(known, cores), known)
    if os.getloadavg()[0] > _BUSY_SHARE * cores:
        return ThreadChoice(cores, {})
    us = measure(candidates(cores, logical))
    _write(path, key, us)
    return ThreadChoice(choose(us, cores), us)


def measure(counts: Sequence[int], budget_s: float = _BUDGET_S) -> dict[int, float]:
    """Time of the layers by number of threads; counts alternate, so that a busy moment affects all alike."""
    if len(counts) == 1:
        return {counts[0]: 0.0}
    pools = {count: ops.ThreadPool(count) for count in counts}
    timer = LayerTimer(_SHAPE, pools[max(counts)])
    best = dict.fromkeys(counts, float("inf"))
    began = time.monotonic()
    while time.monotonic() - began < budget_s:
        for count, pool in pools.items():
            timer.use(pool)
            us = timer.time(_DECODE, 5) + timer.time(_PREFILL, 1) / len(_PREFILL)
            best[count] = min(best[count], us)
    return best


def _read(path: Path, key: str) -> dict[int, float] | None:
    """A stored measurement; None if it is missing, damaged or another machine's."""
    try:
        stored = json.loads(read_regular_text(path))
        return {int(count): float(us) for count, us in stored["us"].items()} if stored["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, key: str, us: dict[int, float]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            part.write_text(json.dumps({"key": key, "us": us}), "utf-8")
    except OSError:
        return  # measured again next time
