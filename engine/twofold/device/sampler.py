"""Samples each row's next token on the device, like `engine.sampler` on the host and with the host's random numbers.

All operations are torch on tensors of fixed shapes that never read their values, so that a graph can hold them. The
parameters of a step are in one buffer at a fixed address. Only the CANDIDATES likeliest tokens are sorted. The effect
of a row's filters on the rest follows from the rest's sum, except a draw that falls into the rest itself: such a row is
left to the host, as is one that changes its logits or reports log-probabilities. Both sides add the same integers
(engine/runtime/ops/sampling/sampling.h), up to the last bit of an exponential: both pick the same token unless the draw
lies within that bit of the border of two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from twofold.api.types import Draw
from twofold.device.device import Device

CANDIDATES: Final = 1024
ON_HOST: Final = -1
"""Result for a row that the host must sample from its logits."""
NOT_FINITE: Final = -2
"""Result for a row whose logits hold a NaN or an infinity."""

_LOST: Final = 2**63 - 1
_FIELDS: Final = 6  # temperature, top_k, top_p, min_p, uniform, whether the device picks
_PADDING: Final = (0.0, 0.0, 1.0, 0.0, 0.0, 1.0)
_OF_HOST: Final = (*_PADDING[:-1], 0.0)


class DeviceSampler:
    """Sampling parameters of up to `num_rows` rows on `device`. `fill` runs before the step, `pick` is part of it."""

    def __init__(self, num_rows: int, device: Device) -> None:
        self._parameters = torch.tensor(
            [_PADDING] * num_rows, dtype=torch.float64, device=device.torch_device
        )
        self._host = device.staging_buffer((num_rows, _FIELDS), torch.float64)

    def fill(self, draws: Sequence[Draw | None]) -> None:
        """Write the next step's rows with one asynchronous copy. None: the host samples this row.

        The previous step must have finished. Further rows become padding, whose result is meaningless.

        Raises:
            ValueError: more rows than the buffer holds.
        """
        room = len(self._host)
        if len(draws) > room:
            raise ValueError(f"{len(draws)} rows to sample were given; there is room for {room}")
        rows = [
            _OF_HOST
            if draw is None
            else (draw.temperature, float(draw.top_k), draw.top_p, draw.min_p, draw.uniform, 1.0)
            for draw in draws
        ]
        self._host.copy_(torch.tensor(rows + [_PADDING] * (room - len(rows)), dtype=torch.float64))
        self._parameters.copy_(self._host, non_blocking=True)

    def pick(self, logits: Tensor) -> Tensor:
        """Tokens int64 [R] of the first R rows, for logits f32 [R, vocabulary]; ON_HOST where the host must sample, and
        NOT_FINITE."""
        num_rows, vocabulary = logits.shape
        fields = self._parameters[:num_rows].unbind(1)
        temperature, top_k, top_p, min_p, uniform, on_device = (field[:, None] for field in fields)
        width = min(CANDIDATES, vocabulary)
        ids = _largest(logits, width)
        values = logits.gather(1, ids).double()
        # Greedy: any temperature works, the first candidate is taken.
        greedy = temperature == 0
        inverse = torch.where(greedy, 1.0, 1.0 / temperature).clamp(max=1e300)
        one = 2.0 ** min(51, 63 - vocabulary.bit_length())
        weights = _weights(values, values[:, :1], inverse, one)
        everything = _weights(logits.double(), values[:, :1], inverse, one).sum(1, keepdim=True)
        cuts_top_k = (top_k >= 1) & (top_k < vocabulary)
        ranks = torch.arange(width, device=logits.device)[None, :]
        weights = torch.where(cuts_top_k & (ranks >= top_k), 0, weights)
        cumulative = weights.cumsum(1)
        seen = cumulative[:, -1:]
        total = torch.where(cuts_top_k, seen, everything)

        # Sum of weights that each filter keeps; _LOST: beyond the candidates, so the sum is unknown.
        needed = torch.minimum(torch.ceil(top_p * total.double()).long().clamp(min=1), total)
        reached = (cumulative < needed).sum(1, keepdim=True)
        by_top_p = torch.where(reached < width, cumulative.gather(1, reached.clamp(max=width - 1)), _LOST)
        by_top_p = torch.where(top_p < 1, by_top_p, total)
        least = torch.ceil(min_p * one).long()
        by_min_p = torch.where(weights >= least, weights, 0).sum(1, keepdim=True)
        by_min_p = torch.where((by_min_p < seen) | (seen == total), by_min_p, _LOST)
        by_min_p = torch.where(min_p > 0, by_min_p, total)
        kept = torch.minimum(by_top_p, by_min_p)
        is_decided = (torch.maximum(by_top_p, by_min_p) < _LOST) | (kept <= seen)
        is_decided &= ~cuts_top_k | (top_k <= width)

        drawn = torch.minimum((uniform * kept.double()).long(), kept - 1)
        index = (cumulative <= drawn).sum(1, keepdim=True)
        decided = (on_device > 0) & ((is_decided & (index < width)) | greedy)
        token = ids.gather(1, torch.where(greedy, 0, index.clamp(max=width - 1)))
        # A sum is a NaN or an infinity if any of its terms is.
        is_finite = torch.isfinite(logits.sum(1, keepdim=True))
        return torch.where(is_finite, torch.where(decided, token, ON_HOST), NOT_FINITE)[:, 0]


def _weights(values: Tensor, highest: Tensor, inverse_temperature: Tensor, one: float) -> Tensor:
    """Integer weights, int64, `one` for the highest logit; see engine/runtime/ops/sampling/sampling.h."""
    return torch.round(torch.exp((values - highest) * inverse_temperature) * one).long()


def _largest(logits: Tensor, count: int) -> Tensor:
    """Columns of each row's `count` largest values, int64, descending; the lower column first among equals.

    topk alone does not order equals, and bf16 logits have many; so it gets distinct keys.
    """
    # A float's bits, read as an integer, sort like floats if negative ones are inverted. 0 - 0 is +0.
    bits = (logits.float() + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    columns = torch.arange(logits.shape[1], device=logits.device)
    keys = (order << 32) + (0xFFFFFFFF - columns)
    return 0xFFFFFFFF - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)
