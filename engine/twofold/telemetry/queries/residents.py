"""Experts in GPU slots at the end of what was recorded, kept by the reader: a refresh reads only new decisions.

`residency` answers the same for any step.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import select, text

from twofold.telemetry import schema
from twofold.telemetry.blocks import entries
from twofold.telemetry.queries.residency import (
    FIELDS,
    decided_shape,
    first_holder,
    from_the_start,
    latest_decisions,
)
from twofold.telemetry.queries.runs import Database, Run
from twofold.telemetry.sink import CacheEventKind

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

_BLOCKS_AT_ONCE: Final = 256
_UNDECIDED: Final = -1


class Residents:
    """The latest admission or eviction of each expert of a run, for any number of threads."""

    def __init__(self, db: Database, run: Run) -> None:
        self._db, self._run = db, run
        self._mutex = threading.Lock()
        self._last_rowid, self._until_step = -1, -1
        shape = decided_shape(run, (max(run.num_layers, 1), max(run.num_experts, 1)))
        self._kind = np.full(shape, _UNDECIDED, np.int8)
        self.num_blocks_read = 0

    def after(self, step: int, hits: I64) -> U8 | None:
        """Experts that are in a slot, or being copied into one, after `step`, as from `residency`.

        Experts without a decision are there if they were ever hit. None if decisions after `step` were read already.
        """
        with self._mutex:
            if step < self._until_step:
                return None
            kind = self._read(step)
        there = from_the_start(kind.shape, hits)
        return first_holder(np.where(kind == _UNDECIDED, there, kind == CacheEventKind.ADMIT))

    def _read(self, step: int) -> npt.NDArray[np.int8]:
        """Keep the blocks that end by `step`; those that go on are read again next time."""
        table = schema.BLOCKS["cache_event"].c
        if self._last_rowid < 0:
            self._begin(step)
        keys = table.first_step, table.last_step, table.num_events
        query = select(text("rowid"), *keys, *(table[name] for name in FIELDS))
        query = query.where(table.run_id == self._run.run_id, table.first_step <= step)
        beyond = None
        last = self._last_rowid
        while True:
            page = query.where(text("rowid > :last").bindparams(last=last)).order_by(text("rowid"))
            rows = self._db.rows(page.limit(_BLOCKS_AT_ONCE))
            for row in rows:
                last = int(row[0])
                if beyond is None and row.last_step > step:
                    beyond = self._kind.copy()
                if beyond is None:
                    self._last_rowid, self._until_step = last, max(self._until_step, row.last_step)
                    self.num_blocks_read += 1
                _apply(self._kind if beyond is None else beyond, _decisions(row), step)
            if len(rows) < _BLOCKS_AT_ONCE:
                return self._kind.copy() if beyond is None else beyond

    def _begin(self, step: int) -> None:
        """Read the decisions up to the last block that ends by `step`, backwards until all slots are filled."""
        table = schema.BLOCKS["cache_event"].c
        ended = select(text("rowid"), table.last_step).where(
            table.run_id == self._run.run_id, table.last_step <= step
        )
        for row in self._db.rows(ended.order_by(table.first_step.desc(), text("rowid DESC")).limit(1)):
            self._last_rowid, self._until_step = int(row[0]), int(row.last_step)
            kind, filled = latest_decisions(self._db, self._run, self._until_step, self._kind.shape)
            self._kind = np.where(filled & (kind == _UNDECIDED), np.int8(CacheEventKind.EVICT), kind)


def _decisions(row: Any) -> dict[str, npt.NDArray[Any]]:
    fields = {name: entries("cache_event", name, row) for name in FIELDS}
    return {**fields, "step": fields["step"].astype(np.int64) + row.first_step}


def _apply(kinds: npt.NDArray[np.int8], found: dict[str, npt.NDArray[Any]], step: int) -> None:
    """Overwrite the kinds of experts with admissions and evictions up to `step`, in the order of their times."""
    cell = tuple(found[name].astype(np.int64) for name in ("device", "layer", "expert"))
    chosen = np.isin(found["kind"], (CacheEventKind.ADMIT, CacheEventKind.EVICT)) & (found["step"] <= step)
    for place, size in zip(cell, kinds.shape, strict=True):
        chosen &= place < size
    order = np.flatnonzero(chosen)
    order = order[np.lexsort((found["at_us"][order], found["step"][order]))]
    kinds[tuple(place[order] for place in cell)] = found["kind"][
        order
    ]  # of equal indices numpy keeps the last
