"""Native events of a run as arrays: routing of tokens, uploads, decisions of the expert cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Integer, literal_column, select, text

from twofold.telemetry import schema
from twofold.telemetry.blocks import blob_dtypes, events_of
from twofold.telemetry.queries.runs import Database, Run

_BLOCKS_AT_ONCE: Final = 64


def blocks(db: Database, run: Run, kind: str, names: Sequence[str]) -> Iterator[npt.NDArray[Any]]:
    """The named scalar fields of all events of a run, a block at a time, in the order in which they were recorded.

    For queries over a whole run: memory holds few blocks, and other fields are not unpacked.
    """
    table, last = schema.BLOCKS[kind], -1
    dtypes = blob_dtypes(kind)
    rowid = literal_column("rowid", Integer).label("place")
    query = select(rowid, table.c.first_step, *(table.c[name] for name in names))
    while True:
        page = query.where(table.c.run_id == run.run_id, rowid > last).order_by(rowid).limit(_BLOCKS_AT_ONCE)
        rows = db.rows(page)
        for row in rows:
            fields = {
                name: np.frombuffer(getattr(row, name), dtypes[name].newbyteorder("<")) for name in names
            }
            found = np.empty(
                len(fields[names[0]]),
                [(name, np.int64 if name == "step" else dtypes[name]) for name in names],
            )
            for name, values in fields.items():
                found[name] = values
            if "step" in fields:
                found["step"] += row.first_step
            yield found
        if len(rows) < _BLOCKS_AT_ONCE:
            return
        last = rows[-1].place


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
