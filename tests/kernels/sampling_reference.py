"""Sampling reference by sorting, which the native selection is compared with."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def pick(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The token, by the rule of engine/runtime/ops/sampling/sampling.h."""
    logits = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    if temperature == 0.0 or not np.isfinite(logits.max()):
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    bits = min(51, 63 - len(logits).bit_length())
    with np.errstate(all="ignore"):
        inverse = min(np.float64(1.0) / np.float64(temperature), 1e300)
        exponents = (logits[order] - logits[order[0]]) * inverse
    weights = np.rint(np.exp(exponents) * 2.0**bits).astype(np.int64)
    if 0 < top_k < len(logits):
        weights = weights[:top_k]
    cumulative = np.cumsum(weights)
    total = int(cumulative[-1])
    kept = total
    if top_p < 1.0:
        needed = min(max(math.ceil(top_p * float(total)), 1), total)
        kept = min(kept, int(cumulative[np.searchsorted(cumulative, needed)]))
    if min_p > 0.0:
        kept = min(kept, int(weights[weights >= math.ceil(min_p * 2.0**bits)].sum()))
    drawn = min(int(uniform * float(kept)), kept - 1)
    return int(order[np.searchsorted(cumulative, drawn, side="right")])


def pick_in_float64(
    logits: F32, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The same with probabilities in float64: the textbook's way, equal but where a draw falls on a border."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    scaled = logits[order].astype(np.float64)
    probabilities = np.exp((scaled - scaled[0]) / temperature)
    probabilities /= probabilities.sum()
    cumulative = np.cumsum(probabilities)
    keep = len(order)
    if top_p < 1.0:
        keep = min(keep, int(np.searchsorted(cumulative, top_p)) + 1)
    if min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(probabilities >= min_p * probabilities[0])))
    drawn = uniform * cumulative[keep - 1]
    return int(order[min(int(np.searchsorted(cumulative[:keep], drawn, side="right")), keep - 1)])
