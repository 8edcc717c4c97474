"""Writes a window of a run as one JSON file that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import or_, select

from twofold.api.whole_file import whole_file
from twofold.telemetry import queries, schema
from twofold.telemetry.exports import trace
from twofold.telemetry.exports.window import ExportWindow
from twofold.telemetry.queries.runs import Database

Progress = Callable[[int, int], None]
"""Called with (steps written, all steps)."""
_REQUESTS_AT_A_TIME = 1000


def write_perfetto(
    db: Database, window: ExportWindow, path: Path, progress: Progress = lambda done, total: None
) -> int:
    """Write the window's trace to `path`, atomically; returns the number of trace events.

    Memory is bounded: rows are read and written by a few hundred steps. A read transaction lasts for one such part, so
    a running server can still empty its log.
    """
    with whole_file(path) as part, part.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        json.dump(_facts(window), file)
        file.write(', "traceEvents": [')
        count = _write_all(file, _all_events(db, window, progress))
        file.write("\n]}\n")
    return count


def _write_all(file: TextIO, events: Iterable[trace.TraceEvent]) -> int:
    count = 0
    for event in events:
        file.write(",\n" if count else "\n")
        file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
        count += 1
    return count


def _facts(window: ExportWindow) -> dict[str, object]:
    run = window.run
    return {
        "program": f"Twofold {run.version}",
        "run": run.run_id,
        "model": run.model,
        "accelerator": run.accelerator,
        "clock": run.clock,
        "emulated": run.emulated,
        "times": "emulated by a cost model in the process 'emulated clock'; wall time in the process 'wall clock'"
        if run.emulated
        else "wall time",
        "begin_unix_s": window.begin_s,
        "telemetry_level": queries.level_of(run),
        "schema_version": schema.SCHEMA_VERSION,
    }


def _all_events(db: Database, window: ExportWindow, progress: Progress) -> Iterator[trace.TraceEvent]:
    yield from trace.track_names(window)
    tracks, origin_us = trace.Tracks(), None
    for first, last in window.step_ranges():
        table = schema.step
        query = select(table).where(table.c.run_id == window.run.run_id, table.c.step.between(first, last))
        steps = db.rows(query.order_by(table.c.step))
        if origin_us is None:
            origin_us = _origin_us(steps, window)
        yield from _of_steps(db, window, steps, origin_us=origin_us, tracks=tracks)
        progress(last - window.first_step + 1, window.num_steps)
    yield from _of_requests(db, window)


def _origin_us(steps: list[Any], window: ExportWindow) -> float | None:
    """The run clock's time of the trace's zero: both clocks agree where the first step begins."""
    for step in steps:
        if step.begin_us is not None:
            return float(step.begin_us - (step.started_s - window.begin_s) * 1e6)
    return None


def _of_steps(
    db: Database, window: ExportWindow, steps: list[Any], *, origin_us: float | None, tracks: trace.Tracks
) -> Iterator[trace.TraceEvent]:
    """Events of consecutive steps; without `origin_us` (recorded by an older version) on the wall clock alone."""
    if not steps:
        return
    numbers = [step.step for step in steps]
    events = {
        kind: queries.events(db, window.run, kind, first_step=numbers[0], last_step=numbers[-1])
        for kind in ("token_layer", "upload", "cache_event")
    }
    for step, layers in zip(steps, trace.by_step(events["token_layer"], numbers), strict=True):
        wall_us = (step.started_s - window.begin_s) * 1e6
        clock_us = None if origin_us is None or step.begin_us is None else step.begin_us - origin_us
        yield from trace.step_events(
            tracks, step, wall_us=wall_us, clock_us=clock_us, emulated=window.run.emulated
        )
        if clock_us is not None and len(layers):
            yield from trace.layer_events(tracks, layers, begin_us=clock_us, step_us=step.step_us)
    if origin_us is not None:
        yield from trace.upload_events(tracks, events["upload"], origin_us=origin_us)
        yield from trace.cache_events(events["cache_event"], origin_us=origin_us)


def _of_requests(db: Database, window: ExportWindow) -> Iterator[trace.TraceEvent]:
    """Requests that were in the server at some time of the window."""
    table = schema.request
    after = -1
    while True:
        query = (
            select(table)
            .where(table.c.run_id == window.run.run_id, table.c.number > after)
            .where(table.c.submitted_s < window.end_s)
            .where(or_(table.c.finished_s.is_(None), table.c.finished_s >= window.begin_s))
            .order_by(table.c.number)
            .limit(_REQUESTS_AT_A_TIME)
        )
        found = db.rows(query)
        for request in found:
            yield from trace.request_events(request, window)
        if len(found) < _REQUESTS_AT_A_TIME:
            return
        after = found[-1].number
