"""Which experts were in slots at a step, and what each upload was good for until its slot was given away."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select

from twofold.telemetry import schema
from twofold.telemetry.queries.copies import CopyRows
from twofold.telemetry.queries.layer_rows import LayerRows
from twofold.telemetry.queries.native_events import blocks
from twofold.telemetry.queries.runs import Database, Run
from twofold.telemetry.sink import CacheEventKind, Placement, UploadReason

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


FIELDS: Final = ("step", "layer", "expert", "kind", "at_us", "device")
"""Fields of a cache event that decide where an expert is."""


def residency(db: Database, run: Run, step: int, hits: I64) -> U8:
    """Experts that are in a slot, or being copied into one, after `step`, [layers, experts]: 0, or 1 + the number of
    the device (the first of several).

    An expert's latest admission or eviction decides. Where it has none, its next one does: it was there from the start
    if the next one evicts it. Where it has none at all, it was there from the start if it was ever hit (`hits`, uses of
    the whole run as [layers, experts]).
    """
    shape = decided_shape(run, hits.shape)
    before, filled = latest_decisions(db, run, step, shape)
    there = np.zeros(shape, bool)
    if not filled:
        after = _Nearest(shape)
        for block in blocks(db, run, "cache_event", FIELDS, first_step=step + 1):
            after.add(_decisions(block, shape, block["step"] > step)[::-1], sign=-1)
        there = np.where(after.kind >= 0, after.kind == CacheEventKind.EVICT, from_the_start(shape, hits))
    return first_holder(np.where(before >= 0, before == CacheEventKind.ADMIT, there))


def decided_shape(run: Run, shape: tuple[int, ...]) -> tuple[int, ...]:
    """[devices, layers, experts] of decisions about experts [layers, experts]."""
    return (max(len(run.devices), 1), *shape)


def from_the_start(shape: tuple[int, ...], hits: I64) -> npt.NDArray[np.bool_]:
    """Experts without any decision that were ever hit. With several devices initial contents are decisions too."""
    there = np.zeros(shape, bool)
    if shape[0] == 1:
        there[0] = hits > 0
    return there


def first_holder(there: npt.NDArray[np.bool_]) -> U8:
    """1 + the first device that has each expert, 0 if none has; `there` is [devices, layers, experts]."""
    return np.where(there.any(axis=0), there.argmax(axis=0) + 1, 0).astype(np.uint8)


def latest_decisions(
    db: Database, run: Run, step: int, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.int8], bool]:
    """The kind of each expert's latest admission or eviction up to `step`, -1 where none was read, [devices, layers,
    experts]; and whether the experts admitted fill all slots, so that no other expert can be in one.

    Reads from `step` backwards until the slots are filled: a few seconds of a busy cache, whatever the run's length.
    """
    num_slots = _most_slots(db, run)
    nearest = _Nearest(shape)
    for block in blocks(db, run, "cache_event", FIELDS, newest_until=step):
        nearest.add(_decisions(block, shape, block["step"] <= step), sign=1)
        if 0 < num_slots <= int((nearest.kind == CacheEventKind.ADMIT).sum()):
            return nearest.kind, True
    return nearest.kind, False


def _most_slots(db: Database, run: Run) -> int:
    """The most slots that the run has had; 0 if it is unknown."""
    table = schema.control.c
    ((most,),) = db.rows(select(func.max(table.num_slots)).where(table.run_id == run.run_id))
    return max(run.num_slots, int(most or 0))


def _decisions(
    block: npt.NDArray[Any], shape: tuple[int, ...], wanted: npt.NDArray[np.bool_]
) -> npt.NDArray[Any]:
    chosen = np.isin(block["kind"], (CacheEventKind.ADMIT, CacheEventKind.EVICT)) & wanted
    sizes = zip(("device", "layer", "expert"), shape, strict=True)
    return block[np.logical_and.reduce([chosen, *(block[name] < size for name, size in sizes)])]


class _Nearest:
    """Each expert's decision nearest to a step, from blocks in any order; arrays are [devices, layers, experts]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.kind = np.full(shape, -1, np.int8)
        """-1 without a decision."""
        self._step = np.full(shape, np.iinfo(np.int64).min)
        self._at_us = np.full(shape, -np.inf)

    def add(self, found: npt.NDArray[Any], *, sign: int) -> None:
        """Take the latest of `found` per expert with sign 1, the earliest with sign -1; of equal times the last, or the
        first."""
        steps, times = sign * found["step"], sign * found["at_us"]
        order = np.lexsort((times, steps))
        _, layers, experts = self.kind.shape
        cell = (found["device"].astype(np.int64) * layers + found["layer"]) * experts + found["expert"]
        newest = np.full(self.kind.size, -1)
        newest[cell[order]] = order  # of equal indices numpy keeps the last
        (cells,) = np.nonzero(newest >= 0)
        chosen = newest[cells]
        later = times[chosen] > self._at_us.flat[cells]
        if sign > 0:
            later |= times[chosen] == self._at_us.flat[cells]
        nearer = steps[chosen] > self._step.flat[cells]
        nearer |= later & (steps[chosen] == self._step.flat[cells])
        cells, chosen = cells[nearer], chosen[nearer]
        self.kind.flat[cells] = found["kind"][chosen]
        self._step.flat[cells], self._at_us.flat[cells] = steps[chosen], times[chosen]


class UploadOutcome(IntEnum):
    """Outcome of an uploaded expert."""

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
    outcome: I64
    """By `UploadOutcome`."""

    def count(self, reason: UploadReason, outcome: UploadOutcome) -> int:
        return int(((self.copies.reason == reason) & (self.outcome == outcome)).sum())


def used_at_once(copies: CopyRows, rows: LayerRows) -> float:
    """Share of these copies, of the steps of `rows`, whose expert the step that decided them used; NaN without any."""
    copies = _within(copies, rows)
    layers = rows.layers

    def cells(step: I64, layer: I64, expert: I64) -> I64:
        return (step * rows.num_layers + layer) * rows.num_experts + expert

    used = cells(layers.use_step, layers.use_layer, layers.use_expert)
    found = np.isin(cells(copies.step, copies.layer, copies.expert), used)
    return float(found.mean()) if len(found) else float("nan")


def _within(copies: CopyRows, rows: LayerRows) -> CopyRows:
    """The copies of the steps of `rows`."""
    if not len(rows.steps):
        return copies
    return copies.where((copies.step >= rows.steps.step[0]) & (copies.step <= rows.steps.step[-1]))


def paybacks(copies: CopyRows, rows: LayerRows) -> Paybacks:
    """Follow each upload of the steps of `rows` from its copy to the next copy into the same slot."""
    copies = _within(copies, rows)
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
    outcome = np.where(
        uses > 0, UploadOutcome.USED, np.where(end < base, UploadOutcome.WASTED, UploadOutcome.WAITING)
    )
    return Paybacks(copies, uses.astype(np.int64), outcome.astype(np.int64))


def _ends(copies: CopyRows) -> I64:
    """Step of the next copy into the same slot; beyond every step where there is none."""
    order = np.lexsort((np.arange(len(copies)), copies.slot))
    slot, step = copies.slot[order], copies.step[order]
    end = np.full(len(copies), np.iinfo(np.int64).max)
    if len(copies) > 1:
        end[order[:-1]] = np.where(slot[1:] == slot[:-1], step[1:], end[order[:-1]])
    return end
