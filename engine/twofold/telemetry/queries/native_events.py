"""Native events of a run as arrays: routing of tokens, uploads, decisions of the expert cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import select, text

from twofold.telemetry import schema
from twofold.telemetry.blocks import events_of
from twofold.telemetry.queries.runs import Database, Run


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
