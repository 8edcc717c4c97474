"""Greedy choice of drafted tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def likeliest(logits: npt.NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """The likeliest token of each row of [rows, vocabulary], and its probability."""
    tokens = logits.argmax(1)
    best = logits[np.arange(len(logits)), tokens]
    chances = 1.0 / np.exp(logits - best[:, None]).sum(1)
    return tokens.tolist(), chances.tolist()
