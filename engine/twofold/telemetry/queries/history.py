"""A run's sums by second and by minute, cached by the reader: each refresh reads only new rows.

Inflating an hour of 48 layers takes seconds, too long for a page that refreshes every two seconds. The first look reads
the window's rows, a longer window the rows before them. The cached placements do not grow with the run: buckets of five
seconds for the last minutes, of a minute for the last hour, and one sum of all rows read. Rows are added, or removed by
age, never rewritten; rows read before retention removed them stay in the sums.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import text

from twofold.telemetry.queries.overview import (
    PART_SUMS,
    STEP_SUMS,
    Overview,
    bucket_length_s,
    newest_step,
    overview_of,
    step_sums,
)
from twofold.telemetry.queries.placements import PlacementGrid
from twofold.telemetry.queries.runs import Database, Run, Window
from twofold.telemetry.sink import Placement
from twofold.telemetry.totals import LAYER_TOTALS

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_CHUNK_ROWS: Final = 2048
"""Rows inflated at a time: 3 MB at 128 experts, 30 ms."""
_BUCKETS: Final = ((5, 300), (60, 3600))
"""(seconds of a bucket, longest window it serves); longer windows use the whole run."""
_LATE_S: Final = 15
"""Rows are written nearly in the order of their seconds: none is later than this."""
# Row numbers rise with time. The plus makes SQLite scan them instead of the whole run by its index.
_ROWS: Final = (
    "SELECT rowid, at_s, layer, uses FROM layer_second WHERE +run_id = :run_id AND num_rows > 0 AND "
)
_NEW_USES: Final = _ROWS + "rowid > :last ORDER BY rowid LIMIT :limit"
_OLD_USES: Final = _ROWS + "rowid < :before AND rowid >= :first ORDER BY rowid DESC LIMIT :limit"
_SUMS: Final = (
    f"SELECT max(rowid), at_s, {', '.join(f'sum({name})' for name in LAYER_TOTALS)} FROM layer_second "  # noqa: S608
)
_NEW_SUMS: Final = _SUMS + "WHERE rowid > :last AND +run_id = :run_id GROUP BY at_s"
_OLD_SUMS: Final = (
    _SUMS + "WHERE run_id = :run_id AND at_s >= :begin_s AND at_s < :end_s AND rowid <= :last GROUP BY at_s"
)
_ALL_OLD_SUMS: Final = (
    _SUMS + "WHERE +run_id = :run_id AND rowid BETWEEN :first AND :last AND at_s < :end_s GROUP BY at_s"
)
_FIRST: Final = (
    "SELECT min(rowid) FROM layer_second WHERE run_id = :run_id AND at_s <= :late_s + "
    "(SELECT min(at_s) FROM layer_second WHERE run_id = :run_id)"
)
_LAST: Final = (
    "SELECT max(rowid) FROM layer_second WHERE run_id = :run_id AND at_s >= "
    "(SELECT max(at_s) FROM layer_second WHERE run_id = :run_id) - :late_s"
)
_NEVER_S: Final = 1 << 40


class RunHistory:
    """Sums of one run so far, for any number of viewers and threads. Created once, then refreshed.

    Each kind of row is read from both sides of the row that was the last one at the first look: rows after it as they
    come, rows before it back to the longest window asked for.
    """

    def __init__(self, db: Database, run: Run) -> None:
        self._db, self._run = db, run
        self._mutex = threading.Lock()
        self.num_rows_read = 0
        """Rows read so far from layer_second and from steps (a second's sums count as one)."""
        self._uses_range: tuple[int, int, int] | None = None
        """The run's first row in layer_second, and the first and the last one whose uses were read."""
        self._sums_range: tuple[int, int] | None = None
        """The last row at the first look, and the last one whose sums were read."""
        self._steps_range: tuple[int, int] | None = None
        """The same in table step."""
        self._sums_begin_s = self._steps_begin_s = _NEVER_S
        """Rows of earlier seconds were not read yet."""
        self._newest_s, self._oldest_s = 0, _NEVER_S
        shape = (max(self._run.num_layers, 1), max(self._run.num_experts, 1), len(Placement))
        self._total = np.zeros(shape, np.int64)
        self._recent: list[dict[int, I64]] = [{} for _ in _BUCKETS]
        self._layers = _BySecond(len(LAYER_TOTALS))
        self._steps = _BySecond(len(STEP_SUMS) + len(PART_SUMS))

    def overview(self, span: Window, *, max_buckets: int = 300) -> Overview:
        """Time series and totals of a window, at most `max_buckets` points each, including the newest rows."""
        with self._mutex:
            self._read_sums(span.begin_s)
            self._read_steps(span.begin_s)
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
            self._read_new_uses()
            end_s = max(span.end_s, self._newest_s + 1)
            if span.begin_s <= int(self._run.started_s):
                while self._read_older_uses():
                    pass
                return PlacementGrid(self._total.copy()), Window(span.begin_s, end_s)
            ago_s = self._newest_s - span.begin_s
            level = next((i for i, (_, longest_s) in enumerate(_BUCKETS) if ago_s <= longest_s), None)
            if level is None:
                raise ValueError(f"the window begins {ago_s} s ago; expected at most {_BUCKETS[-1][1]} s")
            length_s = _BUCKETS[level][0]
            first = span.begin_s // length_s
            while self._read_older_uses(first * length_s):
                pass
            uses = np.zeros_like(self._total)
            for bucket, counted in self._recent[level].items():
                if bucket >= first:
                    uses[: len(counted)] += counted
        return PlacementGrid(uses), Window(max(first * length_s, int(self._run.started_s)), end_s)

    def hits(self, wanted: int) -> I64:
        """Hits in the rows read so far, [layers, experts]; reads a chunk of older ones if fewer than `wanted` experts
        were hit."""
        with self._mutex:
            self._read_new_uses()
            if int((self._total[:, :, Placement.HIT] > 0).sum()) < wanted:
                self._read_older_uses()
            return np.array(self._total[:, :, Placement.HIT], np.int64)

    def _rows(self, query: str, **parameters: int) -> Sequence[Any]:
        return self._db.rows(text(query).bindparams(run_id=self._run.run_id, **parameters))

    def _edge(self, query: str) -> int | None:
        """The run's first or last row number; None if there is no row yet."""
        ((number,),) = self._rows(query, late_s=_LATE_S)
        return None if number is None else int(number)

    def _read_sums(self, begin_s: int) -> None:
        """Read new sums, and those since `begin_s`. Call with the mutex held, as the next four."""
        if self._sums_range is None:
            if (last := self._edge(_LAST)) is None:
                return
            self._sums_range = (last, last)
        first_look, last = self._sums_range
        found = list(self._rows(_NEW_SUMS, last=last))
        self._sums_range = (first_look, max([last, *(int(row[0]) for row in found)]))
        if begin_s < self._sums_begin_s:
            end_s = self._sums_begin_s
            if begin_s <= int(self._run.started_s):
                first = self._edge(_FIRST) or 0
                found += self._rows(_ALL_OLD_SUMS, first=first, last=first_look, end_s=end_s)
            else:
                found += self._rows(_OLD_SUMS, begin_s=begin_s, end_s=end_s, last=first_look)
            self._sums_begin_s = begin_s
        self.num_rows_read += len(found)
        rows = np.array([tuple(row) for row in found], np.float64).reshape(-1, 2 + len(LAYER_TOTALS))
        self._layers.add(rows[:, 1].astype(np.int64), rows[:, 2:])

    def _read_new_uses(self) -> None:
        if self._uses_range is None:
            first, last = self._edge(_FIRST), self._edge(_LAST)
            if first is None or last is None:
                return
            self._uses_range = (first, last + 1, last)
            self._read_older_uses()
        first, oldest, last = self._uses_range
        while rows := self._rows(_NEW_USES, last=last, limit=_CHUNK_ROWS):
            last = int(rows[-1][0])
            self._uses_range = (first, oldest, last)
            self._add_rows(rows)
            if len(rows) < _CHUNK_ROWS:
                return

    def _read_older_uses(self, begin_s: int = 0) -> bool:
        """Read the chunk before those read; False if there is none, or none that reaches beyond `begin_s`."""
        if self._uses_range is None:
            return False
        first, oldest, last = self._uses_range
        if oldest <= first or self._oldest_s < begin_s - _LATE_S:
            return False
        rows = self._rows(_OLD_USES, before=oldest, first=first, limit=_CHUNK_ROWS)
        self._uses_range = (first, int(rows[-1][0]) if len(rows) == _CHUNK_ROWS else first, last)
        self._add_rows(rows)
        return True

    def _add_rows(self, rows: Sequence[Any]) -> None:
        if not rows:
            return
        _, at, layers, blobs = zip(*rows, strict=True)
        at_s = np.array(at, np.int64)
        self.num_rows_read += len(rows)
        self._newest_s = max(self._newest_s, int(at_s.max()))
        self._oldest_s = min(self._oldest_s, int(at_s.min()))
        self._add_uses(at_s, np.array(layers, np.int64), list(blobs))

    def _add_uses(self, at_s: I64, layers: I64, blobs: list[bytes]) -> None:
        most = int(layers.max()) + 1
        if most > len(self._total):
            more = np.zeros((most - len(self._total), *self._total.shape[1:]), np.int64)
            self._total = np.concatenate([self._total, more])
        finest_s = _BUCKETS[0][0]
        new: dict[int, I64] = defaultdict(lambda: np.zeros_like(self._total))
        counts = np.frombuffer(b"".join(map(zlib.decompress, blobs)), "<u4")
        counts = counts.reshape(-1, *self._total.shape[1:])
        cells = at_s // finest_s * len(self._total) + layers
        order = np.argsort(cells, kind="stable")
        found, begins = np.unique(cells[order], return_index=True)
        summed = np.add.reduceat(counts[order], begins, axis=0, dtype=np.int64)
        for cell, uses in zip(found.tolist(), summed, strict=True):
            new[cell // len(self._total)][cell % len(self._total)] = uses
        for at, uses in new.items():
            self._total += uses
            for (length_s, _), kept in zip(_BUCKETS, self._recent, strict=True):
                bucket = at * finest_s // length_s
                merged = uses.copy()
                if bucket in kept:  # possibly made when the run had shown fewer layers
                    merged[: len(kept[bucket])] += kept[bucket]
                kept[bucket] = merged
        for (length_s, longest_s), kept in zip(_BUCKETS, self._recent, strict=True):
            oldest = (self._newest_s - longest_s) // length_s
            for bucket in [bucket for bucket in kept if bucket < oldest]:
                del kept[bucket]

    def _read_steps(self, begin_s: int) -> None:
        if self._steps_range is None:
            if (last := newest_step(self._db, self._run)) is None:
                return
            self._steps_range = (last, last)
        first_look, last = self._steps_range
        reads = [step_sums(self._db, self._run, after_step=last)]
        self._steps_range = (first_look, max(last, reads[0][0]))
        if begin_s < self._steps_begin_s:
            older = (begin_s, self._steps_begin_s)
            reads.append(step_sums(self._db, self._run, until_step=first_look, between_s=older))
            self._steps_begin_s = begin_s
        for _, at_s, sums in reads:
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
