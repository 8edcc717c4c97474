"""Positions chosen one by one for each query of a batch on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold._core.device import PositionLists

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChosenPositions:
    """Positions chosen for each row of a batch on a device, all up to the row's own."""

    positions: Tensor
    """int32 [T, most], ascending; what follows a row's list has no meaning."""
    counts: Tensor
    """int32 [T], lengths of the lists."""

    @classmethod
    def top(cls, scores: Tensor, own: Tensor, most: int) -> ChosenPositions:
        """The positions with the largest scores up to each row's own, the lower position first among equals; NaN counts
        as -infinity. All of them if they are at most `most`.

        Args:
            scores: f32 [T, length].
            own: int64 [T], each row's own position.
        """
        import torch

        length = scores.shape[1]
        places = torch.arange(length, device=scores.device)
        scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
        scores = scores.masked_fill(places > own[:, None], -torch.inf)
        order = torch.sort(scores, descending=True, stable=True)[1][:, :most]
        counts = (own + 1).clamp(max=most)
        unused = places[: order.shape[1]] >= counts[:, None]
        positions = order.masked_fill(unused, length).sort()[0]
        return cls(positions.to(torch.int32), counts.to(torch.int32))

    def after(self, others: ChosenPositions | None) -> ChosenPositions:
        """The rows of `others`, if there are any, then these."""
        import torch

        if others is None:
            return self
        most = max(self.positions.shape[-1], others.positions.shape[-1])
        padded = [
            torch.nn.functional.pad(each.positions, (0, most - each.positions.shape[-1]))
            for each in (others, self)
        ]
        return ChosenPositions(torch.cat(padded), torch.cat([others.counts, self.counts]))

    def of(self, rows: slice) -> ChosenPositions:
        return ChosenPositions(self.positions[rows], self.counts[rows])

    def seen(self, length: int) -> Tensor:
        """bool [T, length]: which of a sequence's first `length` positions are chosen."""
        import torch

        entries = torch.arange(self.positions.shape[1], device=self.positions.device)
        places = torch.where(entries < self.counts[:, None], self.positions, length).long()
        seen = torch.zeros(len(places), length + 1, dtype=torch.bool, device=places.device)
        return seen.scatter_(1, places, True)[:, :length]


def position_lists(chosen: ChosenPositions | None) -> PositionLists:
    """The lists for native kernels, which read them until the launch is done."""
    if chosen is None:
        return PositionLists(positions=None, counts=None, most=0)
    return PositionLists(positions=chosen.positions, counts=chosen.counts, most=chosen.positions.shape[1])
