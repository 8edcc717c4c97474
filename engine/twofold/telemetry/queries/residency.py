"""Which experts were in slots at a step, and what each upload was good for until its slot was given away."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from twofold.telemetry.queries.copies import CopyRows
from twofold.telemetry.queries.layer_rows import LayerRows
from twofold.telemetry.queries.native_events import events
from twofold.telemetry.queries.runs import Database, Run
from twofold.telemetry.sink import CacheEventKind, Placement, UploadReason

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


def residency(db: Database, run: Run, step: int, hits: I64) -> U8:
    """Experts that are in a slot, or being copied into one, after `step`: 1 or 0, [layers, experts].

    An expert's latest admission or eviction decides. Where it has none, its next one does: it was there from the start
    if the next one evicts it. Where it has none at all, it was there from the start if it was ever hit (`hits`, uses of
    the whole run as [layers, experts]).
    """
    found = events(db, run, "cache_event")
    found = found[np.isin(found["kind"], (CacheEventKind.ADMIT, CacheEventKind.EVICT))]
    found = found[np.lexsort((found["at_us"], found["step"]))]
    past = found["step"] <= step
    before = _last_events(found[past], hits.shape)
    after = _last_events(found[~past][::-1], hits.shape)
    there = np.where(after >= 0, after == CacheEventKind.EVICT, hits > 0)
    return np.where(before >= 0, before == CacheEventKind.ADMIT, there).astype(np.uint8)


def _last_events(found: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Kind of each expert's last event, -1 without one; [layers, experts]."""
    kinds = np.full(shape, -1, np.int8)
    inside = found[(found["layer"] < shape[0]) & (found["expert"] < shape[1])]
    kinds[inside["layer"], inside["expert"]] = inside["kind"]  # of equal indices numpy keeps the last
    return kinds


class UploadFate(IntEnum):
    """What became of an uploaded expert."""

    USED = 0
    """Used at least once: hit later, or awaited by the layer that demanded it."""
    WAITING = 1
    """Not used yet, and still in its slot at the end of the rows."""
    WASTED = 2
    """Never used before its slot was given to another expert."""


@dataclass(frozen=True)
class Paybacks:
    """Uses that each upload bought; arrays are [uploads]."""

    copies: CopyRows
    num_uses: I64
    """Steps in which the expert ran on the GPU because of this upload; for demand uploads its own step counts."""
    fate: I64
    """By `UploadFate`."""

    def count(self, reason: UploadReason, fate: UploadFate) -> int:
        return int(((self.copies.reason == reason) & (self.fate == fate)).sum())


def paybacks(copies: CopyRows, rows: LayerRows) -> Paybacks:
    """Follow each upload of the steps of `rows` from its copy to the next copy into the same slot."""
    if len(rows.steps):
        covered = (copies.step >= rows.steps.step[0]) & (copies.step <= rows.steps.step[-1])
        copies = copies.where(covered)
    end = _ends(copies)
    cell = copies.layer * rows.num_experts + copies.expert
    layers = rows.layers
    hit = layers.use_placement == Placement.HIT
    base = int(max(copies.step.max(initial=0), layers.use_step.max(initial=0))) + 2
    hits = np.sort(
        (layers.use_layer[hit] * rows.num_experts + layers.use_expert[hit]) * base + layers.use_step[hit]
    )
    last = np.minimum(end, base - 1)
    later = np.searchsorted(hits, cell * base + last, "right") - np.searchsorted(
        hits, cell * base + copies.step, "right"
    )
    uses = later + (copies.reason == UploadReason.DEMAND)
    fate = np.where(uses > 0, UploadFate.USED, np.where(end < base, UploadFate.WASTED, UploadFate.WAITING))
    return Paybacks(copies, uses.astype(np.int64), fate.astype(np.int64))


def _ends(copies: CopyRows) -> I64:
    """Step of the next copy into the same slot; beyond every step where there is none."""
    order = np.lexsort((np.arange(len(copies)), copies.slot))
    slot, step = copies.slot[order], copies.step[order]
    end = np.full(len(copies), np.iinfo(np.int64).max)
    if len(copies) > 1:
        end[order[:-1]] = np.where(slot[1:] == slot[:-1], step[1:], end[order[:-1]])
    return end
