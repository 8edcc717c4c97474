"""KV cache pages and records on a device, for the prefix cache: copies on the device, or to and from host memory.

Records beyond those of the running sequences are snapshots. They are in host memory, so that the device keeps more
experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from twofold.blocks.block import Block, Record
from twofold.blocks.device_step import DeviceState
from twofold.device.queue import DeviceQueue


class DeviceStateMemory:
    """See `StateMemory`. Called by the engine's thread between two steps."""

    def __init__(
        self,
        blocks: Iterable[tuple[Block, DeviceState]],
        queue: DeviceQueue,
        num_records: int,
        num_snapshots: int = 0,
    ) -> None:
        """blocks: each block with its state; the first dimension of its tensors is pages or records.

        Record numbers from `num_records` on are `num_snapshots` snapshots, then records of drafts.
        """
        self._queue = queue
        self._num_records, self._num_snapshots = num_records, num_snapshots
        self._pages: list[Tensor] = []
        self._records: list[Tensor] = []
        self._snapshots: dict[int, list[Tensor]] = {}
        self.hold(blocks)

    def hold(self, blocks: Iterable[tuple[Block, DeviceState]]) -> None:
        """Use this memory from now on; snapshots are kept."""
        self.release()
        for block, state in blocks:
            keeps_records = any(isinstance(kept, Record) for kept in block.state)
            (self._records if keeps_records else self._pages).extend(state)

    def release(self) -> None:
        """Release pages and records, so that their memory is free."""
        self._pages, self._records = [], []

    def copy_to_host(self, pages: Sequence[int], *, records: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Copy these pages, and all records if `records`, of each tensor to host memory."""
        with self._queue.active():
            kept = (
                [part[torch.tensor(pages, device=part.device)].cpu() for part in self._pages] if pages else []
            )
            return kept, [part.cpu().clone() for part in self._records] if records else []

    def copy_from_host(self, copies: tuple[list[Tensor], list[Tensor]], pages: Sequence[int]) -> None:
        """Copy the result of `copy_to_host` into these pages."""
        kept, records = copies
        with self._queue.active():
            for part, rows in zip(self._pages if kept else [], kept, strict=True):
                part[torch.tensor(pages, dtype=torch.int64, device=part.device)] = rows.to(part.device)
            for part, rows in zip(self._records if records else [], records, strict=True):
                part.copy_(rows)

    def fork_page(self, from_page: int, to_page: int) -> None:
        self._copy([part[from_page] for part in self._pages], [part[to_page] for part in self._pages])

    def fork_record(self, from_record: int, to_record: int) -> None:
        self._copy(self._record(from_record), self._record(to_record))

    def read_page(self, page: int) -> bytes:
        return self._read([part[page] for part in self._pages])

    def write_page(self, page: int, data: bytes) -> None:
        """See `StateMemory`. ValueError: the bytes are not a page of these layers."""
        self._write([part[page] for part in self._pages], data)

    def read_record(self, record: int) -> bytes:
        return self._read(self._record(record))

    def write_record(self, record: int, data: bytes) -> None:
        """See `StateMemory`. ValueError: the bytes are not a record of these layers."""
        self._write(self._record(record), data)

    def record_index(self, number: int) -> int:
        """Where a sequence's or a draft's record is on the device."""
        return number if number < self._num_records else number - self._num_snapshots

    def _record(self, number: int) -> list[Tensor]:
        if not 0 <= number - self._num_records < self._num_snapshots:
            return [part[self.record_index(number)] for part in self._records]
        if number not in self._snapshots:
            self._snapshots[number] = [
                torch.empty(part.shape[1:], dtype=part.dtype) for part in self._records
            ]
        return self._snapshots[number]

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        with self._queue.active():
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    def _read(self, parts: Sequence[Tensor]) -> bytes:
        with self._queue.active():
            return b"".join(_bytes_of(part).cpu().numpy().tobytes() for part in parts)

    def _write(self, parts: Sequence[Tensor], data: bytes) -> None:
        sizes = [part.numel() * part.element_size() for part in parts]
        if sum(sizes) != len(data):
            raise ValueError(f"{len(data)} bytes were given; {sum(sizes)} were expected")
        begin = 0
        with self._queue.active():
            for part, size in zip(parts, sizes, strict=True):
                given = bytearray(data[begin : begin + size])
                _bytes_of(part).copy_(torch.frombuffer(given, dtype=torch.uint8))
                begin += size


def _bytes_of(part: Tensor) -> Tensor:
    """The tensor's memory as bytes."""
    return part.view(-1).view(torch.uint8)
