"""Decode-step inputs in buffers at fixed addresses, copied to the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofold.blocks.device_step import DeviceBatch
from twofold.device.device import Device


@dataclass(frozen=True)
class DecodeRow:
    """One sequence's token in a decode step."""

    token_id: int
    position: int
    pages: Sequence[int]
    record: int = 0


class DecodeInputs:
    """A batch of `size` rows on `device`, all padding until filled."""

    def __init__(self, size: int, page_size: int, max_pages: int, device: Device) -> None:
        self._page_size, self._max_pages = page_size, max_pages
        num_bytes = size * (3 * 8 + 2 * 4 + 4 * max_pages)
        self._host = device.staging_buffer((num_bytes,), torch.uint8)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._written = [part.numpy() for part in _parts(self._host, size)]  # cheaper to write than tensors
        self._pages: list[list[int]] = [[] for _ in range(size)]  # start of each row's page table
        tokens, positions, places, tables, lengths, records = _parts(self._device, size)
        self.batch = DeviceBatch(tokens, positions, places, tables, lengths, records=records)
        self.fill(())

    def fill(self, rows: Sequence[DecodeRow]) -> None:
        """Write the rows; the remaining rows become padding. The previous step must have finished.

        Raises:
            ValueError: a row's pages do not hold its position, or exceed the buffer.
        """
        tokens, positions, places, tables, lengths, records = self._written
        places[: len(rows)] = [self._place(row) for row in rows]
        tokens[: len(rows)] = [row.token_id for row in rows]
        positions[: len(rows)] = [row.position for row in rows]
        lengths[: len(rows)] = [row.position + 1 for row in rows]
        records[: len(rows)] = [row.record for row in rows]
        for padded, value in ((tokens, 0), (positions, 0), (places, -1), (lengths, 0), (records, -1)):
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


def _parts(memory: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Token ids, positions, places, page tables, lengths and records as views of one buffer."""
    wide = memory[: 3 * 8 * size].view(torch.int64)
    narrow = memory[3 * 8 * size :].view(torch.int32)
    tokens, positions, places = wide.chunk(3)
    lengths, records, tables = narrow[:size], narrow[size : 2 * size], narrow[2 * size :]
    return tokens, positions, places, tables.view(size, -1), lengths, records
