"""Overview and placements of a window, asked of the tables: the reference for the sums that `RunHistory` keeps."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Executable, Integer, and_, cast, func, select
from twofold.telemetry import queries, schema
from twofold.telemetry.queries.overview import PART_SUMS, STEP_SUMS, bucket_length_s, overview_of
from twofold.telemetry.totals import LAYER_TOTALS

F64 = npt.NDArray[np.float64]


def overview(
    db: queries.Database, run: queries.Run, span: queries.Window, *, max_buckets: int = 300
) -> queries.Overview:
    bucket_s, num_buckets = bucket_length_s(span, max_buckets)
    step, layer = schema.step.c, schema.layer_second.c
    bucket = cast((step.started_s - span.begin_s) / bucket_s, Integer)
    in_window = and_(
        step.run_id == run.run_id, step.started_s >= float(span.begin_s), step.started_s < float(span.end_s)
    )
    query = select(bucket, *STEP_SUMS, *PART_SUMS).where(in_window).group_by(bucket)
    steps = _by_bucket(db, len(STEP_SUMS) + len(PART_SUMS), num_buckets, query)
    sums = [func.sum(layer[name]) for name in LAYER_TOTALS]
    bucket = (layer.at_s - span.begin_s) // bucket_s
    in_window = and_(layer.run_id == run.run_id, layer.at_s >= span.begin_s, layer.at_s < span.end_s)
    query = select(bucket, *sums).where(in_window).group_by(bucket)
    return overview_of(run, span, bucket_s, steps, _by_bucket(db, len(sums), num_buckets, query))


def placement_grid(db: queries.Database, run: queries.Run, span: queries.Window) -> queries.PlacementGrid:
    table = schema.layer_second.c
    query = select(table.layer, table.uses).where(
        table.run_id == run.run_id, table.at_s >= span.begin_s, table.at_s < span.end_s, table.num_rows > 0
    )
    uses = np.zeros((run.num_layers, run.num_experts, len(queries.Placement)), np.int64)
    for layer, blob in db.rows(query):
        uses[layer] += np.frombuffer(zlib.decompress(blob), "<u4").reshape(uses.shape[1:])
    return queries.PlacementGrid(uses)


def cache_events(db: queries.Database, run: queries.Run) -> list[Any]:
    """Rows of cache_event in the order of their steps."""
    table = schema.cache_event
    return db.rows(select(table).where(table.c.run_id == run.run_id).order_by(table.c.step))


def _by_bucket(db: queries.Database, num_columns: int, num_buckets: int, query: Executable) -> F64:
    """Rows (bucket, a, b, …) as an array [columns, buckets], 0 where a bucket has no row."""
    table = np.zeros((num_columns, num_buckets))
    for row in db.rows(query):
        if 0 <= row[0] < num_buckets:
            table[:, row[0]] = row[1:]
    return table
