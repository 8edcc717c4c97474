"""Causal convolutions on a device, which keep the last inputs of a sequence in its record, each in its position's slot.

Shapes are fixed and no value is read, so that a graph can capture it. Computing a token again is safe, because it
overwrites its own slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.blocks.device_step import DeviceBatch


def convolved(inputs: Tensor, conv: Tensor, tail: Tensor, batch: DeviceBatch, dilation: int = 1) -> Tensor:
    """Each channel's sum of its inputs times the taps, f32 [T, channels]; keeps the inputs.

    Args:
        inputs: f32 [T, channels].
        conv: f32 [taps, channels], the oldest first.
        tail: f32 [records + 1, (taps - 1) * dilation + 1, channels]; padding uses the last record.
        dilation: positions from one tap to the next.
    """
    import torch

    y = torch.zeros_like(inputs)
    for records, rows in batch.by_record():
        own, positions, chain = inputs[rows], batch.positions[rows], batch.chain_of(rows)
        for tap, weights in enumerate(conv):
            back = (len(conv) - 1 - tap) * dilation
            value = _before(own, positions, records, chain, tail, back=back)
            y[rows] += weights * torch.where((positions >= back)[:, None], value, 0.0)
        keep_inputs(own, positions, records, chain, tail)
    return y


def keep_inputs(
    inputs: Tensor, positions: Tensor, records: Tensor, chain: Tensor | None, tail: Tensor
) -> None:
    """Write the inputs [R, channels] of one token of each sequence, or of consecutive tokens of one sequence, to its
    record; or up to each row's position to the row's record (`DeviceBatch.chain`)."""
    import torch

    slots = tail.view(-1, tail.shape[-1])
    if chain is None:
        last = slice(-tail.shape[1], None) if len(inputs) > len(records) else slice(None)
        slots[_slots_of(records, positions[last], tail)] = inputs[last].to(tail.dtype)
        return
    kept = [
        torch.where(
            (chain >= back)[:, None],
            inputs.roll(back, 0).to(tail.dtype),
            slots[_slots_of(_first_records(records, chain), positions - back, tail)],
        )
        for back in range(tail.shape[1])
    ]
    for back, values in enumerate(kept):
        slots[_slots_of(records, positions - back, tail)] = values


def _before(
    inputs: Tensor, positions: Tensor, records: Tensor, chain: Tensor | None, tail: Tensor, *, back: int
) -> Tensor:
    """The inputs `back` positions before the rows' own; of no meaning before a sequence's first position."""
    import torch

    if chain is not None:
        records, number = _first_records(records, chain), chain
    elif len(inputs) > len(records):
        number = torch.arange(len(inputs), device=inputs.device)
    else:
        number = torch.zeros_like(positions)
    kept = tail.view(-1, tail.shape[-1])[_slots_of(records, positions - back, tail)]
    return torch.where((number >= back)[:, None], inputs.roll(back, 0), kept)


def _slots_of(records: Tensor, positions: Tensor, tail: Tensor) -> Tensor:
    """Rows of `tail`, flattened, for these positions; padding has the last record."""
    import torch

    at = torch.where(records < 0, len(tail) - 1, records.long())
    return at * tail.shape[1] + positions % tail.shape[1]


def _first_records(records: Tensor, chain: Tensor) -> Tensor:
    """The record that each row's sequence begins the step from, int32 [R]."""
    import torch

    return records[torch.arange(len(records), device=records.device) - chain.long()]
