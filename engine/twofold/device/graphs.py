"""Decode steps as graphs: one captured step per batch size, with inputs at fixed addresses.

A step runs in the smallest size that holds its rows: one per sequence, and one more per draft to be verified. The
remaining rows are padding: they store nothing, attend to nothing and are routed to no expert. A step that cannot be
captured is launched kernel by kernel by the queue's worker, with the same buffers and results; the reason is kept.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from twofold.blocks.device_step import DeviceBatch
from twofold.device.decode_inputs import DecodeInputs, DecodeRow
from twofold.device.device import Device
from twofold.device.queue import DeviceQueue, Outputs

BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prepared:
    inputs: DecodeInputs
    outputs: Outputs
    start: Callable[[], None]
    is_graph: bool


class _Kind(NamedTuple):
    """Steps that one graph computes."""

    size: int
    chained: bool
    """Whether its rows hand states on."""
    adapted: bool
    """Whether rows use adapters."""


@dataclass
class DecodeGraphs:
    """Graphs of `step` by batch size, captured on demand. `step` computes outputs [S, ...] of a decode batch."""

    step: Callable[[DeviceBatch], Outputs]
    queue: DeviceQueue
    device: Device
    page_size: int
    max_pages: int
    """Pages of one sequence."""
    rehearsal: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context of the first run of a step, whose CPU part is not served: keeps the step from waiting for an answer."""
    keeps_records: bool = False
    """Whether layers keep records: rows of one sequence then take a graph of their own (`DeviceBatch.chain`)."""
    input_width: int = 0
    """See `DecodeInputs`."""
    fall_back_reason: str | None = None
    """Why steps are launched kernel by kernel; None while they are graphs."""
    _prepared: dict[_Kind, _Prepared] = field(default_factory=dict)

    def is_prepared(self, rows: Sequence[DecodeRow]) -> bool:
        """Whether `prepare` has nothing to do for these rows."""
        known = self._prepared.get(self._kind(rows))
        return known is not None and known.is_graph == (self.fall_back_reason is None)

    def prepare(self, rows: Sequence[DecodeRow]) -> None:
        """Capture a graph for such rows, or record that it cannot be captured; runs a rehearsal step.

        Raises:
            ValueError: more rows than a graph holds.
        """
        if self.is_prepared(rows):
            return
        kind = size, chained, adapted = self._kind(rows)
        with self.queue.active(), self.rehearsal():
            inputs = DecodeInputs(
                size,
                self.page_size,
                self.max_pages,
                self.device,
                chained=chained,
                adapted=adapted,
                input_width=self.input_width,
            )
            batch = inputs.batch
            outputs = tuple(torch.empty_like(made) for made in self.step(batch))
        self.queue.wait()
        if self.fall_back_reason is None:
            try:
                replay = self.queue.capture(lambda: self.step(batch), outputs)
                self._prepared[kind] = _Prepared(inputs, outputs, replay, is_graph=True)
                return
            except RuntimeError as error:
                self.fall_back(f"capturing a step of {size} failed ({str(error).splitlines()[0]})")

        def launch() -> None:
            for kept, made in zip(outputs, self.step(batch), strict=True):
                kept.copy_(made)

        self._prepared[kind] = _Prepared(inputs, outputs, lambda: self.queue.start(launch), is_graph=False)

    def start(self, rows: Sequence[DecodeRow]) -> Outputs:
        """Start a step; when the queue has finished it, the returned tensors [len(rows), ...] hold its results.

        Raises:
            ValueError: more rows or pages than a graph holds.
        """
        self.prepare(rows)
        prepared = self._prepared[self._kind(rows)]
        with self.queue.active():
            prepared.inputs.fill(rows)
        prepared.start()
        return tuple(output[: len(rows)] for output in prepared.outputs)

    def forget(self) -> None:
        """Drop captured graphs because the memory they read is about to move; steps are captured again on demand."""
        self._prepared.clear()

    def forget_adapted(self) -> None:
        """Drop the graphs of rows that use adapters, which change more than when they were captured."""
        self._prepared = {kind: kept for kind, kept in self._prepared.items() if not kind.adapted}

    def fall_back(self, reason: str) -> None:
        """Launch kernel by kernel from now on; log the reason once."""
        if self.fall_back_reason is None:
            self.fall_back_reason = reason
            _log.warning("decode runs without CUDA graphs from now on: %s", reason)

    def _kind(self, rows: Sequence[DecodeRow]) -> _Kind:
        if not 1 <= len(rows) <= BATCH_SIZES[-1]:
            raise ValueError(f"a decode graph holds 1 to {BATCH_SIZES[-1]} rows, {len(rows)} were given")
        size = BATCH_SIZES[bisect.bisect_left(BATCH_SIZES, len(rows))]
        chained = self.keeps_records and any(row.chain for row in rows)
        return _Kind(size, chained, any(row.adapter >= 0 for row in rows))
