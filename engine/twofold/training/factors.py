"""Low-rank factors that are trained beside the weights of a layer's experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """The trained factors of one matrix of all experts of a layer (LoRA, arXiv 2106.09685)."""

    a: Tensor
    """float32 [experts, rank, columns]."""
    b: Tensor
    """float32 [experts, rows, rank]."""
    scale: float = 1.0
