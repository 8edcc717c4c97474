"""Counts the tokens that training routes to each expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from twofold.training.base import expert_modules


class ExpertLoad:
    """Counters on the routed experts of a model; evaluations are not counted."""

    def __init__(self, model: nn.Module) -> None:
        self._counts: list[Tensor] = []
        for module in expert_modules(model):
            counts = torch.zeros(len(next(module.parameters(recurse=False))), dtype=torch.int64)
            self._counts.append(counts)
            module.register_forward_pre_hook(_counting(counts))

    def taken(self) -> npt.NDArray[np.uint32] | None:
        """The counts [layers, experts] since the last call; None for a model without routed experts."""
        if not self._counts:
            return None
        found = torch.stack(self._counts).numpy().astype(np.uint32)
        for counts in self._counts:
            counts.zero_()
        return found


def _counting(counts: Tensor) -> Any:
    def count(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if module.training:
            ids = given[1].detach().flatten().to("cpu", torch.int64)
            counts.add_(torch.bincount(ids[(ids >= 0) & (ids < len(counts))], minlength=len(counts)))

    return count
