"""Native events of a run as arrays: routing of tokens, uploads, decisions of the expert cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Integer, literal_column, or_, select, text

from twofold.telemetry import schema
from twofold.telemetry.blocks import blob_dtypes, entries, events_of
from twofold.telemetry.queries.runs import Database, Run

_BLOCKS_AT_ONCE: Final = 64


def blocks(
    db: Database,
    run: Run,
    kind: str,
    names: Sequence[str],
    *,
    first_step: int = 0,
    newest_until: int | None = None,
) -> Iterator[npt.NDArray[Any]]:
    """The named scalar fields of a run's events, a block at a time: memory holds few blocks, and other fields are not
    unpacked.

    Blocks that reach `first_step` or a later step, in the order in which they were recorded. With `newest_until`: those
    that begin by that step, the newest one first, so that a reader can stop early.
    """
    table = schema.BLOCKS[kind]
    rowid = literal_column("rowid", Integer).label("place")
    query = select(rowid, table.c.first_step, table.c.num_events, *(table.c[name] for name in names))
    query = query.where(table.c.run_id == run.run_id).limit(_BLOCKS_AT_ONCE)
    last, until = -1, newest_until
    while True:
        if until is None:
            page = query.where(table.c.last_step >= first_step, rowid > last).order_by(rowid)
        else:
            page = query.where(table.c.first_step <= until)
            if last >= 0:
                page = page.where(or_(table.c.first_step < until, rowid < last))
            page = page.order_by(table.c.first_step.desc(), rowid.desc())
        rows = db.rows(page)
        for row in rows:
            yield _fields(kind, names, row)
        if len(rows) < _BLOCKS_AT_ONCE:
            return
        last, until = rows[-1].place, None if until is None else rows[-1].first_step


def _fields(kind: str, names: Sequence[str], row: Any) -> npt.NDArray[Any]:
    """One block's named fields as a structured array."""
    dtypes = blob_dtypes(kind)
    fields = {name: entries(kind, name, row) for name in names}
    found = np.empty(
        len(fields[names[0]]), [(name, np.int64 if name == "step" else dtypes[name]) for name in names]
    )
    for name, values in fields.items():
        found[name] = values
    if "step" in fields:
        found["step"] += row.first_step
    return found


def events(
    db: Database,
    run: Run,
    kind: str,
    *,
    first_step: int = 0,
    last_step: int | None = None,
    request: int | None = None,
) -> npt.NDArray[Any]:
    """Events of `kind` as an array of `EVENT_DTYPES[kind]`, by step, then as they happened.

    Covers steps first_step to last_step, all steps by default. `request`: only its events.
    """
    table = schema.BLOCKS[kind]
    query = select(table).where(table.c.run_id == run.run_id, table.c.last_step >= first_step)
    if last_step is not None:
        query = query.where(table.c.first_step <= last_step)
    if request is not None and "request" in table.c:
        query = query.where(table.c.request == request)
    found = events_of(kind, db.rows(query.order_by(table.c.first_step, text("rowid"))))
    chosen = found["step"] >= first_step
    if last_step is not None:
        chosen &= found["step"] <= last_step
    if request is not None:
        chosen &= found["request"] == request
    found = found if bool(chosen.all()) else found[chosen]
    steps = found["step"]
    if bool((steps[1:] >= steps[:-1]).all()):
        return found
    return found[np.argsort(steps, kind="stable")]
