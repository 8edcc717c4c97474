"""Names and sums of a run's totals, stored in table `run_total`.

A summary therefore costs the same after a day as after a minute, and retention does not affect it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Final

import numpy as np

from twofold.api.types import StepRecord
from twofold.telemetry.sink import CacheEventKind, UploadReason

Events = np.ndarray[Any, np.dtype[Any]]

LAYER_TOTALS: Final = ("num_hits", "num_cpu", "num_fetched", "num_uploads", "upload_bytes")
STEP_TOTALS: Final = (
    "num_steps",
    "num_prefill_tokens",
    "num_decode_tokens",
    "decode_only_tokens",
    "decode_only_clock_us",
    "decode_only_wall_us",
)


def count_name(member: UploadReason | CacheEventKind) -> str:
    """Name of the total that counts events of this reason or kind."""
    return f"{'upload' if isinstance(member, UploadReason) else 'cache_event'}_{member.name.lower()}"


def totals_of(steps: Iterable[StepRecord], events: Mapping[str, Events]) -> Counter[str]:
    """Amounts that these steps and events (by kind) add to the totals of their run."""
    totals: Counter[str] = Counter()
    for step in steps:
        totals["num_steps"] += 1
        totals["num_prefill_tokens"] += step.num_prefill_tokens
        totals["num_decode_tokens"] += step.num_decode_tokens
        if step.num_prefill_tokens == 0 and step.num_decode_tokens > 0:
            totals["decode_only_tokens"] += step.num_decode_tokens
            totals["decode_only_clock_us"] += step.step_us  # type: ignore[assignment]  # a Counter of floats
            totals["decode_only_wall_us"] += step.wall_us  # type: ignore[assignment]
    if "token_layer" in events:
        for name in ("num_hits", "num_cpu", "num_fetched"):
            totals[name] += int(events["token_layer"][name].sum(dtype=np.int64))
    if "upload" in events:
        totals["num_uploads"] += len(events["upload"])
        totals["upload_bytes"] += int(events["upload"]["size_bytes"].sum())
        _count(totals, events["upload"]["reason"], UploadReason)
    if "cache_event" in events:
        _count(totals, events["cache_event"]["kind"], CacheEventKind)
    return totals


def _count(totals: Counter[str], values: Events, members: type[UploadReason] | type[CacheEventKind]) -> None:
    counts = np.bincount(values, minlength=len(members))
    member: IntEnum
    for member in members:
        totals[count_name(member)] += int(counts[member])
