"""Per-expert routing bias (cache prior) of a device step: experts in slots at its start, for decode rows only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from twofold.blocks.device_step import CachePrior
from twofold.experts.slot_plan import MoeShape

_RESIDENT: Final = 2


class PriorRows:
    """Buffers at fixed addresses, so that a graph can read them."""

    def __init__(self, shape: MoeShape, max_tokens: int, prior: float, device: torch.device) -> None:
        """Allocate the buffers; none where `prior` is 0."""
        self._prior = prior
        if prior > 0:
            self._experts = torch.zeros(
                (shape.num_layers, shape.num_experts), dtype=torch.bool, device=device
            )
            self._rows = torch.zeros(max_tokens, dtype=torch.bool, device=device)

    def fill(self, states: npt.NDArray[np.uint8], generated: Sequence[bool]) -> None:
        """states: [layers, experts] as in `MoeRuntime.placement`."""
        self._experts.copy_(torch.from_numpy(states == _RESIDENT))
        self._rows.zero_()
        self._rows[: len(generated)].copy_(torch.tensor(generated, dtype=torch.bool))

    def of_layer(self, moe_layer: int, num_tokens: int) -> CachePrior | None:
        """The bias of a step's first `num_tokens` rows; None: no bias."""
        if self._prior == 0:
            return None
        return CachePrior(self._prior, self._rows[:num_tokens, None] & self._experts[moe_layer])
