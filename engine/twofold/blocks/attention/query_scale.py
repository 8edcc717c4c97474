"""Scale: a factor of queries that grows with the position (Llama 4, Mistral)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold.blocks.attention.cpu_part import CpuPart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class QueryScale:
    """Queries are multiplied by 1 + slope * log1p(floor((position + shift) / period)); period 0: not at all."""

    period: float = 0.0
    slope: float = 0.0
    shift: int = 1

    def cpu(self) -> CpuPart:
        return dict(vars(self))

    def factors(self, positions: Tensor) -> Tensor:
        """Factors f32 [T] of the queries at `positions` [T]."""
        steps = ((positions + self.shift) / self.period).floor()
        return 1.0 + self.slope * steps.log1p()
