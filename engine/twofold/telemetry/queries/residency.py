"""Which experts were in slots at a step, and what each upload was good for until its slot was given away."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Select, select

from twofold.telemetry import schema
from twofold.telemetry.queries.copies import CopyRows
from twofold.telemetry.queries.layer_rows import LayerRows
from twofold.telemetry.queries.runs import Database, Run
from twofold.telemetry.sink import CacheEventKind, Placement, UploadReason

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

MAX_EVENTS: Final = 100_000
"""Most cache events that are read on either side of a step."""


def residency(db: Database, run: Run, step: int, hits: I64) -> U8:
    """Experts that are in a slot, or being copied into one, after `step`: 1 or 0, [layers, experts].

    An expert's latest admission or eviction decides. Where it has none, its next one does: it was there from the start
    if the next one evicts it. Where it has none at all, it was there from the start if it was ever hit (`hits`, uses of
    the whole run as [layers, experts]).
    """
    table = schema.cache_event.c
    events = (
        select(table.layer, table.expert, table.kind)
        .where(table.run_id == run.run_id)
        .where(table.kind.in_([int(CacheEventKind.ADMIT), int(CacheEventKind.EVICT)]))
        .limit(MAX_EVENTS)
    )
    before = _first_events(
        db, events.where(table.step <= step).order_by(table.step.desc(), table.at_us.desc()), hits.shape
    )
    after = _first_events(db, events.where(table.step > step).order_by(table.step, table.at_us), hits.shape)
    there = np.where(after >= 0, after == CacheEventKind.EVICT, hits > 0)
    return np.where(before >= 0, before == CacheEventKind.ADMIT, there).astype(np.uint8)


def _first_events(db: Database, query: Select[Any], shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Kind of each expert's first event in the query's order, -1 without one; [layers, experts]."""
    found = np.full(shape, -1, np.int8)
    rows = np.array([tuple(row) for row in db.rows(query)], np.int64).reshape(-1, 3)[::-1]
    inside = (rows[:, 0] < shape[0]) & (rows[:, 1] < shape[1])
    rows = rows[inside]
    found[rows[:, 0], rows[:, 1]] = rows[:, 2]  # of equal indices numpy keeps the last: the first event
    return found


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
