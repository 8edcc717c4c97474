"""Where experts ran by layer, expert copies, and expert-cache decisions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import text

from twofold.telemetry.queries.native_events import events
from twofold.telemetry.queries.runs import Database, Run, Window, run_totals
from twofold.telemetry.sink import CacheEventKind, Placement, UploadReason
from twofold.telemetry.totals import count_name

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

UNUSED: Final = len(Placement)
"""In addition to the values of `Placement`: the expert was not used."""
_CHUNK_ROWS: Final = 2048
_USES: Final = (
    "SELECT layer, uses FROM layer_second "
    "WHERE run_id = :run_id AND at_s >= :begin_s AND at_s < :end_s AND num_rows > 0"
)


@dataclass(frozen=True)
class PlacementGrid:
    """How often each expert was used, and where it ran."""

    uses: npt.NDArray[np.int64]
    """[layers, experts, 3], last axis by `Placement`."""

    @property
    def total(self) -> I64:
        """[layers, experts]"""
        return np.asarray(self.uses.sum(axis=2), np.int64)

    @property
    def dominant(self) -> npt.NDArray[np.uint8]:
        """[layers, experts]: the `Placement` where the expert ran most often, or UNUSED."""
        return np.where(self.total > 0, self.uses.argmax(axis=2), UNUSED).astype(np.uint8)

    @property
    def hit_share(self) -> F64:
        """[layers, experts], NaN where unused."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.uses[:, :, Placement.HIT] / self.total, np.float64)

    def by_placement(self, placement: Placement) -> int:
        return int(self.uses[:, :, placement].sum())


def placements_between(db: Database, run: Run, span: Window) -> PlacementGrid:
    """Uses by layer, expert and placement in exactly this window; reads each of its rows."""
    bounds = {"run_id": run.run_id, "begin_s": span.begin_s, "end_s": span.end_s}
    rows = db.rows(text(_USES).bindparams(**bounds))
    layers = max([run.num_layers, 1, *(int(layer) + 1 for layer, _ in rows)])
    uses = np.zeros((layers, max(run.num_experts, 1), len(Placement)), np.int64)
    for first in range(0, len(rows), _CHUNK_ROWS):
        at, blobs = zip(*rows[first : first + _CHUNK_ROWS], strict=True)
        counts = np.frombuffer(b"".join(map(zlib.decompress, blobs)), "<u4").reshape(-1, *uses.shape[1:])
        np.add.at(uses, np.array(at, np.int64), counts)
    return PlacementGrid(uses)


@dataclass(frozen=True)
class Upload:
    """One host-to-device copy; `*_us` are on the run's clock since its start."""

    step: int
    request: int
    layer: int
    expert: int
    slot: int
    size_bytes: int
    queued_us: float
    begin_us: float
    end_us: float
    reason: UploadReason
    lane: int
    device: int


def uploads(
    db: Database, run: Run, *, first_step: int = 0, last_step: int | None = None, limit: int = 10_000
) -> list[Upload]:
    """Copies queued in steps first_step to last_step, in the order they were recorded."""
    rows = events(db, run, "upload", first_step=first_step, last_step=last_step)[:limit]
    names = [field.name for field in fields(Upload)]
    return [
        Upload(**{**dict(zip(names, row, strict=True)), "reason": UploadReason(row[names.index("reason")])})
        for row in rows[names].tolist()
    ]


def upload_counts(db: Database, run: Run) -> dict[UploadReason, int]:
    """Copies by reason, over the whole run."""
    totals = run_totals(db, run)
    return {reason: int(totals[count_name(reason)]) for reason in UploadReason}


def cache_event_counts(db: Database, run: Run) -> dict[CacheEventKind, int]:
    """Number of cache decisions by kind, over the whole run."""
    totals = run_totals(db, run)
    return {kind: int(totals[count_name(kind)]) for kind in CacheEventKind}
