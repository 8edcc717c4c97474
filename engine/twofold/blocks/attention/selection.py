"""Select: which positions a query attends to. A kind derives from `Selection`; attention itself knows none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold._core import Stretch

if TYPE_CHECKING:
    from torch import Tensor


class Selection(ABC):
    """Positions that a query attends to beside its own, all before it."""

    @abstractmethod
    def num_before(self, position: int) -> int:
        """Number of earlier positions that the query at `position` attends to."""

    @abstractmethod
    def seen(self, positions: Tensor, length: int) -> Tensor:
        """bool [Q, length]: which of a sequence's first `length` positions queries at `positions` [Q] attend to."""

    @property
    @abstractmethod
    def native(self) -> Stretch:
        """This kind for native code, on the CPU and on a device."""


@dataclass(frozen=True)
class Everything(Selection):
    """All earlier positions."""

    def num_before(self, position: int) -> int:
        return position

    def seen(self, positions: Tensor, length: int) -> Tensor:
        import torch

        return torch.arange(length, device=positions.device)[None, :] <= positions[:, None]

    @property
    def native(self) -> Stretch:
        return Stretch()


@dataclass(frozen=True)
class Window(Everything):
    """The last `size` positions, the query's own included."""

    size: int

    def num_before(self, position: int) -> int:
        return min(position, self.size)

    def seen(self, positions: Tensor, length: int) -> Tensor:
        import torch

        places = torch.arange(length, device=positions.device)[None, :]
        return super().seen(positions, length) & (places > positions[:, None] - self.size)

    @property
    def native(self) -> Stretch:
        return Stretch(window=self.size)


@dataclass(frozen=True)
class Chunk(Everything):
    """Positions of the query's own chunk of `size` consecutive ones (Llama 4)."""

    size: int

    def num_before(self, position: int) -> int:
        return position % self.size

    def seen(self, positions: Tensor, length: int) -> Tensor:
        import torch

        begin = positions - positions % self.size
        places = torch.arange(length, device=positions.device)[None, :]
        return super().seen(positions, length) & (places >= begin[:, None])

    @property
    def native(self) -> Stretch:
        return Stretch(chunk=self.size)
