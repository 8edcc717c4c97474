"""Decode-step inputs in buffers at fixed addresses, copied to the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofold.blocks.block_weights import F32
from twofold.blocks.device_step import DeviceBatch
from twofold.device.device import Device


@dataclass(frozen=True)
class DecodeRow:
    """A token in a decode step. A sequence has several, at consecutive positions, where its drafts are verified."""

    token_id: int
    position: int
    pages: Sequence[int]
    record: int = 0
    chain: int = 0
    """Rows directly before it that belong to the same sequence."""
    adapter: int = -1
    """Number of its adapter; -1: none."""
    shift: int = 0
    """Its position in rotary embedding minus `position`."""
    inputs: Sequence[float] | F32 = ()
    """Inputs of layers [input_width], where the host computes them."""


class DecodeInputs:
    """A batch of `size` rows on `device`, all padding until filled."""

    def __init__(
        self,
        size: int,
        page_size: int,
        max_pages: int,
        device: Device,
        *,
        chained: bool = False,
        adapted: bool = False,
        input_width: int = 0,
    ) -> None:
        """chained: rows hand their records' states on (`DeviceBatch.chain`). adapted: rows use adapters. input_width:
        elements of a row's inputs of layers that the host computes."""
        self._page_size, self._max_pages = page_size, max_pages
        num_bytes = size * (4 * 8 + 4 * 4 + 4 * max_pages + 4 * input_width)
        self._host = device.staging_buffer((num_bytes,), torch.uint8)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        # Arrays are cheaper to write than tensors.
        self._written = [part.numpy() for part in _parts(self._host, size, input_width)]
        self._pages: list[list[int]] = [[] for _ in range(size)]  # start of each row's page table
        tokens, positions, places, rotations, inputs, tables, lengths, records, chain, adapters = _parts(
            self._device, size, input_width
        )
        self.batch = DeviceBatch(
            tokens,
            positions,
            places,
            tables,
            lengths,
            records=records,
            chain=chain if chained else None,
            adapters=adapters if adapted else None,
            rotations=rotations,
            layer_inputs=inputs if input_width else None,
        )
        self.fill(())

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        """Write the rows; the remaining rows become padding. The previous step must have finished.

        Raises:
            ValueError: a row's pages do not hold its position, or exceed the buffer.
        """
        tokens, positions, places, rotations, of_layers, *others = self._written
        tables, lengths, records, chain, adapters = others
        for written, row in zip(of_layers, rows if of_layers.size else (), strict=False):
            written[:] = row.inputs
        places[: len(rows)] = [self._place(row) for row in rows]
        tokens[: len(rows)] = [row.token_id for row in rows]
        positions[: len(rows)] = [row.position for row in rows]
        rotations[: len(rows)] = [row.position + row.shift for row in rows]
        lengths[: len(rows)] = [row.position + 1 for row in rows]
        records[: len(rows)] = [row.record for row in rows]
        chain[: len(rows)] = [row.chain for row in rows]
        adapters[: len(rows)] = [row.adapter for row in rows]
        paddings = (
            *((part, 0) for part in (tokens, positions, rotations, lengths, chain)),
            *((part, -1) for part in (places, records, adapters)),
        )
        for padded, value in paddings:
            padded[len(rows) :] = value
        for index, row in enumerate(rows):
            # Sequences usually only grow from step to step: at most the last page is new.
            pages, known = list(row.pages), self._pages[index]
            same = len(known) if pages[: len(known)] == known else 0
            tables[index, same : len(pages)] = pages[same:]
            self._pages[index] = pages
        self._device.copy_(self._host, non_blocking=True)

    def _place(self, row: DecodeRow) -> int:
        page, offset = divmod(row.position, self._page_size)
        if page >= len(row.pages) or len(row.pages) > self._max_pages:
            raise ValueError(
                f"position {row.position} with {len(row.pages)} pages of {self._page_size} was given; "
                f"the page of each position and at most {self._max_pages} pages were expected"
            )
        return row.pages[page] * self._page_size + offset


def _parts(memory: Tensor, size: int, input_width: int) -> tuple[Tensor, ...]:
    """Token ids, positions, places, rotary positions, inputs of layers, page tables, lengths, records, chain and
    adapters as views of one buffer."""
    wide, inputs, narrow = memory.tensor_split((4 * 8 * size, (4 * 8 + 4 * input_width) * size))
    numbers, tables = narrow.view(torch.int32).tensor_split((4 * size,))
    of_layers = inputs.view(torch.float32).view(size, input_width)
    return *wide.view(torch.int64).chunk(4), of_layers, tables.view(size, -1), *numbers.chunk(4)
