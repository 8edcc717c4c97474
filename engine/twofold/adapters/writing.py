"""Products of an adapter as files hold them: stacks of all experts of a layer, one rank for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from twofold.adapters.adapter import F32, Adapter, LowRank
from twofold.adapters.base_shapes import BaseExperts, BaseShapes

Parts = dict[str, list[LowRank | None]]
"""By part, one product for each expert of a layer; None: it is not changed."""


def by_layer(adapter: Adapter, base: BaseShapes) -> tuple[dict[str, LowRank], dict[str, Parts]]:
    """The products of single matrices, and those of routed experts: by layer's name, by part, one for each expert."""
    single: dict[str, LowRank] = {}
    routed: dict[str, Parts] = {}
    for key, product in adapter.products.items():
        if key in base.matrices:
            single[key] = product
            continue
        module, _, part = key.rpartition(".")
        layer, _, number = module.rpartition(".")
        parts = routed.setdefault(layer, {})
        parts.setdefault(part, [None] * base.experts[layer].num_experts)[int(number)] = product
    return single, routed


def stacked(
    products: Sequence[LowRank | None], shape: tuple[int, int], rank: int | None = None
) -> tuple[F32, F32]:
    """Factors a [experts, rank, columns] and b [experts, rows, rank], filled up with zeros.

    shape: (rows, columns) of one. rank: at least the largest; None: the largest.
    """
    rank = rank or max(each.rank for each in products if each is not None)
    a = np.zeros((len(products), rank, shape[1]), np.float32)
    b = np.zeros((len(products), shape[0], rank), np.float32)
    for number, each in enumerate(products):
        if each is not None:
            a[number, : each.rank], b[number, :, : each.rank] = each.a, each.b
    return a, b


def fused(parts: Mapping[str, Sequence[LowRank | None]], experts: BaseExperts) -> list[LowRank | None]:
    """Gate and up of each expert as one product; of the rank of both together unless they share `a`."""
    missing: list[LowRank | None] = [None] * experts.num_experts
    pairs = zip(parts.get("gate_proj", missing), parts.get("up_proj", missing), strict=True)
    return [_fused(gate, up, experts) for gate, up in pairs]


def _fused(gate: LowRank | None, up: LowRank | None, experts: BaseExperts) -> LowRank | None:
    found = [each for each in (gate, up) if each is not None]
    if not found:
        return None
    shares = gate is not None and up is not None and np.array_equal(gate.a, up.a)
    a = found[0].a if shares else np.concatenate([each.a for each in found])
    b = np.zeros((2, experts.intermediate_size, len(a)), np.float32)
    begin = 0
    for half, each in enumerate((gate, up)):
        if each is not None:
            b[half, :, begin : begin + each.rank] = each.b
            begin += 0 if shares else each.rank
    order = b.swapaxes(0, 1) if experts.interleaved else b
    return LowRank(a, np.ascontiguousarray(order).reshape(-1, len(a)))
