"""The most used experts of a window, with what the cache did for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twofold.telemetry.queries.copies import CopyRows
from twofold.telemetry.queries.placements import PlacementGrid
from twofold.telemetry.sink import Placement


@dataclass(frozen=True)
class HotExpert:
    """One expert of one layer."""

    layer: int
    expert: int
    uses: int
    hit_rate: float
    """Share of its uses that found it on a GPU."""
    uploads: int
    """Its copies in the window."""
    since_step: int | None
    """Step of the copy that brought it into its slot; None: it is in none, or was there before the window."""
    resident: bool


def hottest(
    grid: PlacementGrid, copies: CopyRows, residents: npt.NDArray[np.uint8], *, limit: int = 100
) -> list[HotExpert]:
    """The most used experts, most used first.

    Args:
        residents: [layers, experts], above 0 where an expert is in a slot.
    """
    total = grid.total
    uploads, since = np.zeros_like(total), np.full(total.shape, -1)
    np.add.at(uploads, (copies.layer, copies.expert), 1)
    np.maximum.at(since, (copies.layer, copies.expert), copies.step)
    order = np.argsort(-total, axis=None, kind="stable")[:limit]
    found = []
    for layer, expert in zip(*np.unravel_index(order, total.shape), strict=True):
        at = int(layer), int(expert)
        if not total[at]:
            break
        resident = at[0] < len(residents) and bool(residents[at])
        found.append(
            HotExpert(
                *at,
                uses=int(total[at]),
                hit_rate=float(grid.uses[at][Placement.HIT] / total[at]),
                uploads=int(uploads[at]),
                since_step=int(since[at]) if resident and since[at] >= 0 else None,
                resident=resident,
            )
        )
    return found
