"""Which experts the tokens of a timed layer go to. Plain Python: peers' workers draw the same."""

from __future__ import annotations

import random


def random_routing(draw: random.Random, tokens: int, experts: int, top_k: int) -> list[list[int]]:
    """[tokens][top_k] different experts for each token, all equally likely."""
    return [draw.sample(range(experts), top_k) for _ in range(tokens)]


def balanced_routing(draw: random.Random, tokens: int, experts: int, top_k: int) -> list[list[int]]:
    """As many tokens for every expert (tokens * top_k must be a multiple of experts), different experts per token.

    A random order of the experts is dealt out again and again.
    """
    if tokens * top_k % experts:
        raise ValueError(f"{tokens} tokens of {top_k} experts cannot be shared evenly by {experts}")
    order = draw.sample(range(experts), experts)
    return [[order[(token * top_k + slot) % experts] for slot in range(top_k)] for token in range(tokens)]
