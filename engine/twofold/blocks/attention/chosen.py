"""Positions chosen one by one for each query of a batch on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold._core.device import PositionLists

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChosenPositions:
    """Positions chosen for each row of a batch on a device, all up to the row's own: one list, or several, each for as
    many adjacent heads."""

    positions: Tensor
    """int32 [T, most] or [T, lists, most], ascending; what follows a list has no meaning."""
    counts: Tensor
    """int32 [T] or [T, lists], lengths of the lists."""

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

    def of_blocks(self, block: int, own: Tensor) -> ChosenPositions:
        """The positions of blocks whose numbers these are, up to each row's own position [T]."""
        import torch

        within = torch.arange(block, dtype=torch.int32, device=own.device)
        positions = (self.positions[:, :, None] * block + within).flatten(1)
        numbers = torch.nn.functional.pad(self.positions, (0, 1))  # a list may be empty
        newest = numbers.gather(1, (self.counts.long() - 1).clamp(min=0)[:, None])[:, 0]
        beyond = ((newest + 1) * block - own - 1).clamp(min=0)
        return ChosenPositions(positions, (self.counts * block - beyond).clamp(min=0).to(torch.int32))

    def followed_by(self, first: Tensor, counts: Tensor, most: int) -> ChosenPositions:
        """These, then for each row [T] `counts` positions from `first` on, at most `most`, all after these."""
        import torch

        within = torch.arange(most, dtype=torch.int32, device=first.device)
        positions = torch.nn.functional.pad(self.positions, (0, most))
        places = self.counts[:, None].long() + within
        positions = positions.scatter(1, places, (first[:, None] + within).to(torch.int32))
        return ChosenPositions(positions, self.counts + counts.to(torch.int32))

    def by_head(self, lists: int) -> ChosenPositions:
        """Every `lists` rows as the lists of one row."""
        rows, most = len(self.positions) // lists, self.positions.shape[1]
        return ChosenPositions(self.positions.view(rows, lists, most), self.counts.view(rows, lists))

    def within(self, seen: Tensor, num_heads: int) -> Tensor:
        """Chosen ones of the positions `seen`, bool [T, length]; of several lists: [heads, T, length]."""
        import torch

        length = seen.shape[1]
        entries = torch.arange(self.positions.shape[-1], device=self.positions.device)
        places = torch.where(entries < self.counts[..., None], self.positions, length).long()
        chosen = torch.zeros((*places.shape[:-1], length + 1), dtype=torch.bool, device=places.device)
        chosen = chosen.scatter_(-1, places, True)[..., :length]
        if chosen.ndim == 2:
            return seen & chosen
        return (seen[:, None] & chosen).transpose(0, 1).repeat_interleave(num_heads // chosen.shape[1], 0)


def position_lists(chosen: ChosenPositions | None) -> PositionLists:
    """The lists for native kernels, which read them until the launch is done."""
    if chosen is None:
        return PositionLists(positions=None, counts=None, most=0)
    lists = chosen.counts.shape[1] if chosen.counts.ndim > 1 else 1
    return PositionLists(
        positions=chosen.positions, counts=chosen.counts, most=chosen.positions.shape[-1], lists=lists
    )
