"""The weighted sum of several adapters as one adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from twofold.adapters.adapter import Adapter, LowRank
from twofold.api.errors import ModelLoadError


def weighted_sum(parts: Sequence[tuple[Adapter, float]], name: str) -> Adapter:
    """The adapter whose change of each matrix is the sum of scale · change: its rank is the sum of their ranks.

    Raises ModelLoadError for an adapter that replaces whole matrices, which no scale applies to.
    """
    for adapter, _ in parts:
        if adapter.replaced:
            raise ModelLoadError(
                f"adapter {adapter.name} replaces {', '.join(adapter.replaced)}; use it alone, with scale 1"
            )
    products: dict[str, list[tuple[LowRank, float]]] = {}
    for adapter, scale in parts:
        for matrix, product in adapter.products.items():
            products.setdefault(matrix, []).append((product, scale))
    digests = " ".join(f"{adapter.digest} {scale!r}" for adapter, scale in parts)
    return Adapter(
        name,
        hashlib.sha256(digests.encode()).hexdigest(),
        {matrix: _stacked(own) for matrix, own in products.items()},
        {},
        next((adapter.base_name for adapter, _ in parts if adapter.base_name), ""),
    )


def _stacked(products: Sequence[tuple[LowRank, float]]) -> LowRank:
    a = np.concatenate([product.a for product, _ in products])
    b = np.concatenate([np.float32(scale) * product.b for product, scale in products], axis=1)
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b))
