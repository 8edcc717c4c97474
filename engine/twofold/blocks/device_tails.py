"""Inputs that a convolution keeps of a sequence on a device: `taps` of them per record, each in its position's slot.

Shapes are fixed and no value is read, so that a graph can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def slots_of(records: Tensor, positions: Tensor, tail: Tensor) -> Tensor:
    """Rows of `tail` [records + 1, taps, channels], flattened, for these positions; padding has the last record."""
    import torch

    at = torch.where(records < 0, len(tail) - 1, records.long())
    return at * tail.shape[1] + positions % tail.shape[1]


def first_records(records: Tensor, chain: Tensor) -> Tensor:
    """The record that each row's sequence begins the step from, int32 [R] (`DeviceBatch.chain`)."""
    import torch

    return records[torch.arange(len(records), device=records.device) - chain.long()]


def keep_chained(inputs: Tensor, positions: Tensor, records: Tensor, chain: Tensor, tail: Tensor) -> None:
    """Write each row's record: the inputs up to the row's position. inputs: [R, channels]."""
    import torch

    slots = tail.view(-1, tail.shape[-1])
    begun = first_records(records, chain)
    kept = []
    for back in range(tail.shape[1]):
        before = slots[slots_of(begun, positions - back, tail)]
        kept.append(torch.where((chain >= back)[:, None], inputs.roll(back, 0).to(tail.dtype), before))
    for back, values in enumerate(kept):
        slots[slots_of(records, positions - back, tail)] = values
