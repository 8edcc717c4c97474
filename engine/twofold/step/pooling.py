"""Pools the hidden states of a request's prompt into one vector, while its chunks are computed.

The formulas are those of sentence-transformers' Pooling and Normalize modules.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twofold.api.pooling import Pooling

F32 = npt.NDArray[np.float32]
_LEAST_NORM = 1e-12
"""As torch.nn.functional.normalize: the zero vector stays zero."""


class Pooler:
    """State of one request. The result does not depend on how the prompt is cut into chunks."""

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        """num_tokens: length of the prompt."""
        self.pooling = pooling
        self._num_tokens = num_tokens
        self._total: npt.NDArray[np.float64] | None = None
        self._count = 0

    def wanted(self, begin: int, end: int) -> range:
        """Positions from `begin` to before `end` whose hidden states, or logits, `add` takes in order."""
        if self.pooling.kind == "mean" and not self.pooling.tokens:
            return range(max(begin, self._count), end)  # those before a preemption are kept
        at = 0 if self.pooling.kind == "cls" and not self.pooling.tokens else self._num_tokens - 1
        return range(at, at + 1) if begin <= at < end else range(0)

    def add(self, values: F32) -> None:
        """Take the hidden state [hidden] of the next wanted position, or its logits [vocabulary]."""
        if self.pooling.tokens:
            self._total, self._count = values[list(self.pooling.tokens)].astype(np.float64), 1
        elif self.pooling.kind != "mean" or self._total is None:
            self._total, self._count = values.astype(np.float64), 1
        else:
            self._total += values
            self._count += 1

    def vector(self) -> F32:
        """The result, f32, once all wanted positions were added."""
        assert self._total is not None, "a pooled prompt without hidden states"
        vector = self._total / self._count
        if not self.pooling.tokens:
            vector = vector[: self.pooling.dimensions]
            if self.pooling.normalise:
                vector /= max(float(np.sqrt(np.square(vector).sum())), _LEAST_NORM)
        return vector.astype(np.float32)
