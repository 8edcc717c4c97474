"""Plain float64 reference of a router for one token's logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Shape:
    """`ops.RouterShape` in Python."""

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top_two_sum"] = "max"
    zero_others: bool = False

    def options(self) -> dict[str, Any]:
        """All but top_k."""
        return {name: value for name, value in vars(self).items() if name != "top_k"}


def route(
    logits: Sequence[float], shape: Shape, bias: Sequence[float] | None = None
) -> tuple[list[int], list[float]]:
    """The experts in the order of choosing, and their weights."""
    experts = range(len(logits))
    scores = _scores([float(x) for x in logits], shape)
    choice = [scores[e] + (0.0 if bias is None else float(bias[e])) for e in experts]
    size = len(logits) // shape.num_groups

    def group_score(group: int) -> float:
        best = sorted(choice[group * size : (group + 1) * size], reverse=True)
        return best[0] if shape.group_score == "max" else sum(best[:2])

    groups = sorted(range(shape.num_groups), key=lambda g: (-group_score(g), g))[: shape.top_groups]
    others = [e for e in experts if e // size not in groups]
    choice = [0.0 if e in others else choice[e] for e in experts]
    allowed = [e for e in experts if shape.zero_others or e not in others]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: shape.top_k]
    weights = [scores[e] for e in ids]
    if shape.score == "softmax_of_chosen":
        weights = _softmax(weights)
    if shape.renormalise:
        total = sum(weights) + 1e-20
        weights = [w / total for w in weights]
    return ids, [w * shape.scale for w in weights]


def _scores(logits: list[float], shape: Shape) -> list[float]:
    if shape.score == "softmax":
        return _softmax(logits)
    if shape.score == "sigmoid":
        return [1.0 / (1.0 + math.exp(-x)) for x in logits]
    if shape.score == "sqrt_softplus":
        return [math.sqrt(math.log1p(math.exp(x))) for x in logits]
    return logits


def _softmax(values: list[float]) -> list[float]:
    powers = [math.exp(x - max(values)) for x in values]
    return [power / sum(powers) for power in powers]
