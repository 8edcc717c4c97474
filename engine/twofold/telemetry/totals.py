"""Names and sums of a run's totals, stored in table `run_total`.

A summary therefore costs the same after a day as after a minute, and retention does not affect it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import compress
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


NUM_TRANSACTIONS: Final = "num_transactions"
"""Transactions of the run that were committed: after a lost connection it tells whether the last one was."""


def count_name(member: UploadReason | CacheEventKind) -> str:
    """Name of the total that counts events of this reason or kind."""
    return f"{'upload' if isinstance(member, UploadReason) else 'cache_event'}_{member.name.lower()}"


def device_total(device: int, name: str) -> str:
    """Name of a device's total: "uploads", "upload_bytes", or "runs", which counts tokens' experts that it ran."""
    return f"device_{device}_{name}"


def totals_of(steps: Sequence[StepRecord], events: Mapping[str, Events]) -> Counter[str]:
    """Amounts that these steps and events (by kind) add to the totals of their run."""
    totals: Counter[str] = Counter()
    if steps:
        totals.update(_step_totals(steps))
    if "token_layer" in events:
        for name in ("num_hits", "num_cpu", "num_fetched"):
            totals[name] += int(events["token_layer"][name].sum(dtype=np.int64))
    if "upload" in events:
        totals["num_uploads"] += len(events["upload"])
        totals["upload_bytes"] += int(events["upload"]["size_bytes"].sum())
        _count(totals, events["upload"]["reason"], UploadReason)
    if "cache_event" in events:
        _count(totals, events["cache_event"]["kind"], CacheEventKind)
    _count_by_device(totals, events)
    return totals


def _count_by_device(totals: Counter[str], events: Mapping[str, Events]) -> None:
    """Totals of devices after the first, so that a run with one device has none; the first has the rest."""
    uploads, layers = events.get("upload"), events.get("token_layer")
    if uploads is not None and uploads["device"].any():
        sizes = np.bincount(uploads["device"], uploads["size_bytes"])
        for device, count in enumerate(np.bincount(uploads["device"]).tolist()):
            if device and count:
                totals[device_total(device, "uploads")] += count
                totals[device_total(device, "upload_bytes")] += int(sizes[device])
    if layers is not None and layers["devices"].any():
        for device, count in enumerate(np.bincount(layers["devices"].ravel()).tolist()):
            if device and count:
                totals[device_total(device, "runs")] += count


def _step_totals(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Amounts named by STEP_TOTALS."""
    _, _, prefill, computed, _, _, clock_us, wall_us = zip(*(step[:8] for step in steps), strict=True)
    # Rejected drafted tokens are part of no answer.
    decode = [
        tokens - step.num_drafted_tokens + step.num_accepted_tokens
        for tokens, step in zip(computed, steps, strict=True)
    ]
    only = [tokens > 0 and not prefilled for prefilled, tokens in zip(prefill, decode, strict=True)]
    return {
        "num_steps": len(steps),
        "num_prefill_tokens": sum(prefill),
        "num_decode_tokens": sum(decode),
        "decode_only_tokens": sum(compress(decode, only)),
        "decode_only_clock_us": sum(compress(clock_us, only)),
        "decode_only_wall_us": sum(compress(wall_us, only)),
    }


def _count(totals: Counter[str], values: Events, members: type[UploadReason] | type[CacheEventKind]) -> None:
    counts = np.bincount(values, minlength=len(members))
    member: IntEnum
    for member in members:
        totals[count_name(member)] += int(counts[member])
