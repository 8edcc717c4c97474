"""Random routing of a timed layer's tokens. Plain Python: peers' workers draw the same."""

from __future__ import annotations

import random


def random_routing(draw: random.Random, tokens: int, experts: int, top_k: int) -> list[list[int]]:
    """[tokens][top_k] different experts for each token, all equally likely."""
    return [draw.sample(range(experts), top_k) for _ in range(tokens)]


def balanced_routing(draw: random.Random, tokens: int, experts: int, top_k: int) -> list[list[int]]:
    """Routing with equally many tokens per expert (which must divide tokens * top_k), all different per token.

    A random order of the experts is dealt out again and again.
    """
    if tokens * top_k % experts:
        raise ValueError(f"{tokens} tokens of {top_k} experts cannot be shared evenly by {experts}")
    order = draw.sample(range(experts), experts)
    return [[order[(token * top_k + slot) % experts] for slot in range(top_k)] for token in range(tokens)]
