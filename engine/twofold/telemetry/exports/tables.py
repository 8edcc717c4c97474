"""The rows of a run's tables, in parts of bounded size, for files of other formats.

Every table of the schema is exported but `meta`. Experts are unpacked: `token_layer` has one row per token and layer
without its arrays, `token_expert` one per routed expert, `expert_second` one per second, layer, expert and placement.
Columns have the database's names and units. Times of an emulated run are the cost model's; `run.emulated` says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import ColumnElement, Float, Integer, LargeBinary, Table, and_, func, or_, select

from twofold.telemetry import queries, schema
from twofold.telemetry.exports.window import ExportWindow
from twofold.telemetry.queries.runs import Database
from twofold.telemetry.sink import EVENT_DTYPES, Placement

ROWS_AT_A_TIME: Final = 32768
PLACEMENTS: Final = np.array([member.name.lower() for member in Placement])

Part = Mapping[str, Sequence[Any]]
"""Values by column; all of the same length."""


@dataclass(frozen=True)
class TableParts:
    """One exported table."""

    name: str
    columns: Mapping[str, type]
    """int, float or str, by column."""
    parts: Iterator[Part]


_KEYS: Final = {
    "run": "run_id",
    "request": "number",
    "step": "step",
    "training_step": "step",
    "control": "at_s",
    "layer_second": "at_s",
    "machine_sample": "at_s",
    "load_sample": "finished_s",
    "run_total": "name",
    "dropped": "kind",
}
"""Exported tables that hold plain rows, and the column by which they are read in parts."""
_TIMES: Final = {
    "layer_second": "at_s",
    "machine_sample": "at_s",
    "training_step": "at_s",
    "control": "at_s",
    "load_sample": "finished_s",
}
"""Columns of tables whose rows belong to a moment."""
_TOKEN_EXPERT: Final = {
    "run_id": int,
    "step": int,
    "request": int,
    "position": int,
    "layer": int,
    "rank": int,
    "expert": int,
    "placement": str,
    "weight": float,
    "device": int,
}
_EXPERT_SECOND: Final = {
    "run_id": int,
    "at_s": int,
    "layer": int,
    "expert": int,
    "placement": str,
    "uses": int,
}


def all_tables(db: Database, window: ExportWindow) -> Iterator[TableParts]:
    """Every table of the window, one after another."""
    for name, key in _KEYS.items():
        table = schema.metadata.tables[name]
        columns = {c.name: _type(c.type) for c in table.columns if not isinstance(c.type, LargeBinary)}
        yield TableParts(name, columns, _plain_rows(db, window, table, key=key, columns=list(columns)))
    yield TableParts("expert_second", _EXPERT_SECOND, _expert_seconds(db, window))
    for kind, dtype in EVENT_DTYPES.items():
        scalars = {name: dtype[name] for name in dtype.names or () if dtype[name].subdtype is None}
        types = {name: int if kinds.kind in "iu" else float for name, kinds in scalars.items()}
        yield TableParts(kind, {"run_id": int, **types}, _events(db, window, kind, list(types)))
    yield TableParts("token_expert", _TOKEN_EXPERT, _token_experts(db, window))


def _type(kind: Any) -> type:
    return int if isinstance(kind, Integer) else float if isinstance(kind, Float) else str


def _selection(window: ExportWindow, table: Table) -> ColumnElement[bool]:
    """Rows of the window; tables without a time are exported whole."""
    column = table.c
    of_run = column.run_id == window.run.run_id
    if table.name == "step":
        return and_(of_run, column.step.between(window.first_step, window.last_step))
    if table.name == "request":
        ended = or_(column.finished_s.is_(None), column.finished_s >= window.begin_s)
        return and_(of_run, column.submitted_s < window.end_s, ended)
    time = _TIMES.get(table.name)
    # Times of load samples are their client's, whose clock may differ.
    if time is None or window.is_whole:
        return of_run
    # A whole second holds all that began in it.
    begin_s = int(window.begin_s) if isinstance(column[time].type, Integer) else window.begin_s
    return and_(of_run, column[time] >= begin_s, column[time] < window.end_s)


def _pages(db: Database, window: ExportWindow, table: Table, *, key: str) -> Iterator[list[Any]]:
    """Rows in order of `key`, some thousands at a time. Rows of one key value are never split.

    Each part is a query of its own: one long read would keep a running server from emptying its log.
    """
    column, chosen = table.c[key], _selection(window, table)
    after: Any = None
    while True:
        rest = chosen if after is None else and_(chosen, column > after)
        page = select(column).where(rest).order_by(column).limit(ROWS_AT_A_TIME).subquery()
        until = db.rows(select(func.max(page.c[key])))[0][0]
        if until is None:
            return
        yield db.rows(select(table).where(rest, column <= until).order_by(column))
        after = until


def _plain_rows(
    db: Database, window: ExportWindow, table: Table, *, key: str, columns: list[str]
) -> Iterator[Part]:
    for rows in _pages(db, window, table, key=key):
        yield {name: [getattr(row, name) for row in rows] for name in columns}


def _expert_seconds(db: Database, window: ExportWindow) -> Iterator[Part]:
    num_experts = window.run.num_experts
    for rows in _pages(db, window, schema.layer_second, key="at_s"):
        used = [row for row in rows if row.uses]
        for first in range(0, len(used), 256):
            some = used[first : first + 256]
            blobs = b"".join(zlib.decompress(row.uses) for row in some)
            uses = np.frombuffer(blobs, "<u4").reshape(len(some), num_experts, len(Placement))
            row, expert, placement = np.nonzero(uses)
            yield {
                "run_id": [window.run.run_id] * len(row),
                "at_s": np.array([each.at_s for each in some])[row].tolist(),
                "layer": np.array([each.layer for each in some])[row].tolist(),
                "expert": expert.tolist(),
                "placement": PLACEMENTS[placement].tolist(),
                "uses": uses[row, expert, placement].tolist(),
            }


def _events(db: Database, window: ExportWindow, kind: str, fields: list[str]) -> Iterator[Part]:
    for first, last in window.step_ranges():
        events = queries.events(db, window.run, kind, first_step=first, last_step=last)
        for begin in range(0, len(events), ROWS_AT_A_TIME):
            some = events[begin : begin + ROWS_AT_A_TIME]
            yield {
                "run_id": [window.run.run_id] * len(some),
                **{name: some[name].tolist() for name in fields},
            }


def _token_experts(db: Database, window: ExportWindow) -> Iterator[Part]:
    for first, last in window.step_ranges():
        events = queries.events(db, window.run, "token_layer", first_step=first, last_step=last)
        for begin in range(0, len(events), ROWS_AT_A_TIME):
            some = events[begin : begin + ROWS_AT_A_TIME]
            routed = np.arange(some["experts"].shape[1]) < some["num_routed"][:, None]
            row, rank = np.nonzero(routed)
            yield {
                "run_id": [window.run.run_id] * len(row),
                **{name: some[name][row].tolist() for name in ("step", "request", "position", "layer")},
                "rank": rank.tolist(),
                "expert": some["experts"][routed].tolist(),
                "placement": PLACEMENTS[some["placement"][routed]].tolist(),
                "weight": some["weights"][routed].tolist(),
                "device": some["devices"][routed].tolist(),
            }
