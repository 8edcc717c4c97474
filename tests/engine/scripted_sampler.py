"""A sampler that picks prescribed tokens, so that logits of different runners can be compared row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from twofold.api.types import Draw, SamplingParams
from twofold.step.sampler import Sampler


class ScriptedSampler(Sampler):
    """Picks the scripted tokens, and keeps the logits."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(SamplingParams(), ())
        self._tokens = list(tokens)
        self.seen: list[npt.NDArray[np.float32]] = []

    def draw(self, num_later: int = 0) -> Draw | None:
        """The host has to see the logits."""
        return None

    def take_from(self, token: int, logits: npt.NDArray[np.float32], row: int) -> int:
        """The next scripted token."""
        self.seen.append(np.array(logits[row]))
        return self._tokens[len(self.seen) - 1]
