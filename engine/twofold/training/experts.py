"""Routed experts as a function of torch: frozen weights in an expert store, trained low-rank factors beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold.blocks import ops


@dataclass(frozen=True)
class Factors:
    """The trained factors of one matrix of all experts of a layer (LoRA, arXiv 2106.09685)."""

    a: Tensor
    """float32 [experts, rank, columns]."""
    b: Tensor
    """float32 [experts, rows, rank]."""
    scale: float = 1.0


class ExpertLayer:
    """One layer's routed experts. Calls share one thread pool, so they run one at a time."""

    def __init__(
        self, pool: ops.ThreadPool, store: _core.ExpertStore, layer: int, *, keeps: bool = True
    ) -> None:
        """
        Args:
            layer: index among the model's MoE layers.
            keeps: keep what backward reads of a forward, 8 bytes per routed row and unit of the intermediate size;
                otherwise backward computes it again.
        """
        self.layer, self.keeps = layer, keeps
        self.native = _core.ExpertTraining(pool, store)

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: tuple[Factors | None, ...]
    ) -> Tensor:
        """Weighted sum [tokens, hidden] of each token's experts.

        Args:
            hidden: [tokens, hidden].
            ids: [tokens, top_k], integers.
            weights: [tokens, top_k].
            factors: of gate, up and down; None: the matrix is not trained.
        """
        flat = [tensor for each in factors for tensor in ((None, None) if each is None else (each.a, each.b))]
        scales = tuple(0.0 if each is None else each.scale for each in factors)
        apply: Callable[..., Tensor] = _Experts.apply
        return apply(self, scales, hidden, ids, weights, *flat)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: ExpertLayer,
        scales: tuple[float, ...],
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        *factors: Tensor | None,
    ) -> Tensor:
        arrays = _arrays(hidden, ids, weights), _native_factors(factors, scales)
        y, ctx.kept = layer.native.forward(layer.layer, *arrays[0], arrays[1], keep=layer.keeps)
        ctx.layer, ctx.scales = layer, scales
        ctx.save_for_backward(hidden, ids, weights, *factors)
        return _tensor(y).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        hidden, ids, weights, *factors = ctx.saved_tensors
        rows = _arrays(hidden, ids, weights)
        native = ctx.layer.native
        of_factors = _native_factors(factors, ctx.scales)
        dx, dweights, gradients = native.backward(ctx.layer.layer, *rows, of_factors, _f32(dy), ctx.kept)
        flat = [array for each in gradients for array in ((None, None) if each is None else each)]
        return (
            None,
            None,
            _tensor(dx).to(hidden.dtype),
            None,
            _tensor(dweights).to(weights.dtype),
            *(None if array is None else _tensor(array) for array in flat),
        )


def _tensor(array: Any) -> Tensor:
    """The values in torch's own memory, aligned to cache lines: the bits of MKL's products depend on alignment."""
    return torch.from_numpy(array).clone()


def _f32(tensor: Tensor) -> Any:
    """The values as a C-contiguous float32 array."""
    return np.ascontiguousarray(tensor.detach().to(torch.float32).numpy())


def _arrays(hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, Any, Any]:
    return _f32(hidden), np.ascontiguousarray(ids.to(torch.int32).numpy()), _f32(weights)


def _native_factors(factors: Any, scales: tuple[float, ...]) -> list[tuple[Any, Any, float] | None]:
    pairs = zip(factors[::2], factors[1::2], scales, strict=True)
    return [None if a is None else (_f32(a), _f32(b), scale) for a, b, scale in pairs]
