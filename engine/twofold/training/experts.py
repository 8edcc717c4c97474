"""Routed experts as a function of torch: frozen weights in an expert store, trained low-rank factors beside them.

The CPU computes them, and a device beside it those that a lane's plan gives it (`device_lane`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold.blocks import ops
from twofold.training.factors import Factors

if TYPE_CHECKING:
    from twofold.training.device_lane import DeviceLane


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
        self.lane: DeviceLane | None = None
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
        rows, native = _arrays(hidden, ids, weights), layer.native
        share = None if layer.lane is None else layer.lane.share(layer.layer, rows[1])
        # The device first: its work is launched, and runs beside the CPU's.
        there = None if share is None else share.forward(hidden, weights, _factors(factors, scales))
        y, ctx.kept = native.forward(
            layer.layer,
            *rows,
            _native_factors(factors, scales),
            keep=layer.keeps,
            elsewhere=[] if share is None else share.elsewhere,
        )
        ctx.layer, ctx.scales, ctx.share = layer, scales, share
        ctx.save_for_backward(hidden, ids, weights, *factors)
        return _sum(y, there, hidden)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        hidden, ids, weights, *factors = ctx.saved_tensors
        rows, share = _arrays(hidden, ids, weights), ctx.share
        there = None if share is None else share.backward(hidden, weights, _factors(factors, ctx.scales), dy)
        dx, dweights, gradients = ctx.layer.native.backward(
            ctx.layer.layer,
            *rows,
            _native_factors(factors, ctx.scales),
            _f32(dy),
            ctx.kept,
            elsewhere=[] if share is None else share.elsewhere,
        )
        flat = [array for each in gradients for array in ((None, None) if each is None else each)]
        of_factors = [
            None if array is None or factor is None else _tensor(array).to(factor.device)
            for array, factor in zip(flat, factors, strict=True)
        ]
        if there is not None:
            for total, found in zip(of_factors, there.factors, strict=True):
                if total is not None and found is not None:
                    total[share.experts] = found.to(total.device)
        return (
            None,
            None,
            _sum(dx, None if there is None else there.dx, hidden),
            None,
            _sum(dweights, None if there is None else there.dweights, weights),
            *of_factors,
        )


def _sum(here: Any, there: Tensor | None, like: Tensor) -> Tensor:
    """The CPU's part and the device's, as `like` has its numbers and place."""
    total = _tensor(here).to(like.device)
    if there is not None:
        total += there.to(like.device)
    return total.to(like.dtype)


def _tensor(array: Any) -> Tensor:
    """The values in torch's own memory, aligned to cache lines: the bits of MKL's products depend on alignment."""
    return torch.from_numpy(array).clone()


def _f32(tensor: Tensor) -> Any:
    """The values as a C-contiguous float32 array."""
    return np.ascontiguousarray(tensor.detach().to("cpu", torch.float32).numpy())


def _arrays(hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, Any, Any]:
    return _f32(hidden), np.ascontiguousarray(ids.to("cpu", torch.int32).numpy()), _f32(weights)


def _factors(flat: Any, scales: tuple[float, ...]) -> tuple[Factors | None, ...]:
    pairs = zip(flat[::2], flat[1::2], scales, strict=True)
    return tuple(None if a is None else Factors(a, b, scale) for a, b, scale in pairs)


def _native_factors(factors: Any, scales: tuple[float, ...]) -> list[tuple[Any, Any, float] | None]:
    pairs = zip(factors[::2], factors[1::2], scales, strict=True)
    return [None if a is None else (_f32(a), _f32(b), scale) for a, b, scale in pairs]
