"""A run's sums by second and by minute, cached by the reader: each refresh reads only new rows.

Inflating an hour of 48 layers takes seconds, too long for a page that refreshes every two seconds. The cached
placements do not grow with the run: buckets of five seconds for the last minutes, of a minute for the last hour, and
one sum of the whole run. Rows are added, or removed by age, never rewritten; rows read before retention removed them
stay in the sums.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import func, select, text

from twofold.telemetry import schema
from twofold.telemetry.queries.overview import (
    PART_SUMS,
    STEP_SUMS,
    Overview,
    bucket_length_s,
    overview_of,
    step_sums,
)
from twofold.telemetry.queries.placements import PlacementGrid
from twofold.telemetry.queries.runs import Database, Run, Window
from twofold.telemetry.sink import Placement
from twofold.telemetry.totals import LAYER_TOTALS

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_CHUNK_ROWS: Final = 4096
"""Rows inflated at a time: 6 MB at 128 experts."""
_BUCKETS: Final = ((5, 300), (60, 3600))
"""(seconds of a bucket, longest window it serves); longer windows use the whole run."""
_NEW_ROWS: Final = (
    # The plus makes SQLite scan the end of the table by rowid instead of the whole run by its index.
    "SELECT rowid, at_s, layer, uses FROM layer_second "
    "WHERE rowid > :last AND +run_id = :run_id AND num_rows > 0 ORDER BY rowid LIMIT :limit"
)
_NEW_SUMS: Final = (
    f"SELECT max(rowid), at_s, {', '.join(f'sum({name})' for name in LAYER_TOTALS)} FROM layer_second "  # noqa: S608
    "WHERE rowid > :last AND +run_id = :run_id GROUP BY at_s"
)


class RunHistory:
    """Sums of one run so far, for any number of viewers and threads. Created once, then refreshed."""

    def __init__(self, db: Database, run: Run) -> None:
        self._db, self._run = db, run
        self._mutex = threading.Lock()
        self.num_rows_read = 0
        """Rows read so far from layer_second and from steps (a second's sums count as one)."""
        self._last_rowid: int | None = None
        """Last row whose uses of experts were read; inflating uses takes far longer than reading sums."""
        self._last_sums_rowid: int | None = None
        self._last_step = -1
        self._newest_s = 0
        shape = (max(self._run.num_layers, 1), max(self._run.num_experts, 1), len(Placement))
        self._total = np.zeros(shape, np.int64)
        self._recent: list[dict[int, I64]] = [{} for _ in _BUCKETS]
        self._layers = _BySecond(len(LAYER_TOTALS))
        self._steps = _BySecond(len(STEP_SUMS) + len(PART_SUMS))

    def overview(self, span: Window, *, max_buckets: int = 300) -> Overview:
        """Time series and totals of a window, at most `max_buckets` points each, including the newest rows."""
        with self._mutex:
            self._read_sums()
            self._read_steps()
            bucket_s, num_buckets = bucket_length_s(span, max_buckets)
            steps = self._steps.by_bucket(span.begin_s, bucket_s, num_buckets)
            layers = self._layers.by_bucket(span.begin_s, bucket_s, num_buckets)
        return overview_of(self._run, span, bucket_s=bucket_s, steps=steps, layers=layers)

    def placements(self, span: Window) -> tuple[PlacementGrid, Window]:
        """Uses by layer, expert and placement from the window's start to the latest row, and the window covered.

        It starts at a bucket's start: up to 5 s (for windows beyond 300 s up to a minute) earlier than requested.
        Raises ValueError for a start that is neither the run's nor in the hour before its latest row.
        """
        with self._mutex:
            self._read_uses()
            end_s = max(span.end_s, self._newest_s + 1)
            if span.begin_s <= int(self._run.started_s):
                return PlacementGrid(self._total.copy()), Window(span.begin_s, end_s)
            ago_s = self._newest_s - span.begin_s
            level = next((i for i, (_, longest_s) in enumerate(_BUCKETS) if ago_s <= longest_s), None)
            if level is None:
                raise ValueError(f"the window begins {ago_s} s ago; expected at most {_BUCKETS[-1][1]} s")
            length_s = _BUCKETS[level][0]
            first = span.begin_s // length_s
            uses = np.zeros_like(self._total)
            for bucket, counted in self._recent[level].items():
                if bucket >= first:
                    uses[: len(counted)] += counted
        return PlacementGrid(uses), Window(max(first * length_s, int(self._run.started_s)), end_s)

    def _before_first_row(self) -> int | None:
        """Number before that of the run's first row in layer_second; None if there is no row yet."""
        table = schema.layer_second
        (row,) = self._db.rows(
            select(func.min(text("rowid"))).select_from(table).where(table.c.run_id == self._run.run_id)
        )
        return None if row[0] is None else int(row[0]) - 1

    def _read_sums(self) -> None:
        """Call with the mutex held, as the next two."""
        if self._last_sums_rowid is None:
            self._last_sums_rowid = self._before_first_row()
        if self._last_sums_rowid is None:
            return
        query = text(_NEW_SUMS).bindparams(last=self._last_sums_rowid, run_id=self._run.run_id)
        rows = np.array([tuple(row) for row in self._db.rows(query)], np.float64)
        if not len(rows):
            return
        self.num_rows_read += len(rows)
        self._last_sums_rowid = int(rows[:, 0].max())
        self._layers.add(rows[:, 1].astype(np.int64), rows[:, 2:])

    def _read_uses(self) -> None:
        if self._last_rowid is None:
            self._last_rowid = self._before_first_row()
        while self._last_rowid is not None:
            query = text(_NEW_ROWS).bindparams(
                last=self._last_rowid, run_id=self._run.run_id, limit=_CHUNK_ROWS
            )
            rows = self._db.rows(query)
            if not rows:
                return
            rowids, at, layers, blobs = zip(*rows, strict=True)
            at_s = np.array(at, np.int64)
            self.num_rows_read += len(rows)
            self._last_rowid = int(rowids[-1])
            self._newest_s = max(self._newest_s, int(at_s.max()))
            self._add_uses(at_s, np.array(layers, np.int64), list(blobs))
            if len(rows) < _CHUNK_ROWS:
                return

    def _add_uses(self, at_s: I64, layers: I64, blobs: list[bytes]) -> None:
        if not blobs:
            return
        most = int(layers.max()) + 1
        if most > len(self._total):
            more = np.zeros((most - len(self._total), *self._total.shape[1:]), np.int64)
            self._total = np.concatenate([self._total, more])
        finest_s = _BUCKETS[0][0]
        new: dict[int, I64] = defaultdict(lambda: np.zeros_like(self._total))
        shape = self._total.shape[1:]
        for at, layer, blob in zip((at_s // finest_s).tolist(), layers.tolist(), blobs, strict=True):
            new[at][layer] += np.frombuffer(zlib.decompress(blob), "<u4").reshape(shape)
        for at, uses in new.items():
            self._total += uses
            for (length_s, _), kept in zip(_BUCKETS, self._recent, strict=True):
                bucket = at * finest_s // length_s
                summed = uses.copy()
                if bucket in kept:  # possibly made when the run had shown fewer layers
                    summed[: len(kept[bucket])] += kept[bucket]
                kept[bucket] = summed
        for (length_s, longest_s), kept in zip(_BUCKETS, self._recent, strict=True):
            oldest = (self._newest_s - longest_s) // length_s
            for bucket in [bucket for bucket in kept if bucket < oldest]:
                del kept[bucket]

    def _read_steps(self) -> None:
        last, at_s, sums = step_sums(self._db, self._run, after_step=self._last_step)
        self._last_step = max(self._last_step, last)
        self.num_rows_read += len(at_s)
        self._steps.add(at_s, sums)


class _BySecond:
    """Sums per second with activity, ascending."""

    def __init__(self, num_columns: int) -> None:
        self._at_s = np.zeros(0, np.int64)
        self._sums = np.zeros((0, num_columns))

    def add(self, at_s: I64, sums: F64) -> None:
        """Add `sums` [rows, columns] of the seconds `at_s` [rows], in any order."""
        if not len(at_s):
            return
        # Only entries not older than the new rows move: the rest of a long run stays in place.
        keep = int(np.searchsorted(self._at_s, at_s.min()))
        every_s = np.concatenate([self._at_s[keep:], at_s])
        order = np.argsort(every_s, kind="stable")
        found, begins = np.unique(every_s[order], return_index=True)
        added = np.add.reduceat(np.concatenate([self._sums[keep:], sums])[order], begins, axis=0)
        self._at_s = np.concatenate([self._at_s[:keep], found])
        self._sums = np.concatenate([self._sums[:keep], added])

    def by_bucket(self, begin_s: int, bucket_s: int, num_buckets: int) -> F64:
        """[columns, buckets], 0 where there was no activity."""
        first, last = np.searchsorted(self._at_s, (begin_s, begin_s + bucket_s * num_buckets))
        bucket = (self._at_s[first:last] - begin_s) // bucket_s
        columns = [np.bincount(bucket, column, num_buckets) for column in self._sums[first:last].T]
        return np.array(columns, np.float64)
