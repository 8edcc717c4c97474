"""Decode steps as graphs: one captured step per batch size, its inputs in buffers whose addresses never change.

A step runs in the smallest graph that holds its sequences; the rest of the rows are padding, which stores nothing,
attends to nothing and is routed to nobody. What cannot be captured falls back to eager, with the reason kept.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from twofold.model.device_model import DeviceBatch

BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32)
_log = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Captures a function that writes a tensor: (what runs it again, that tensor)."""


def capture_cuda(run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Capture on the current CUDA device. `run` has run before, so that libraries have made their workspaces."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


@dataclass
class _Captured:
    batch: DeviceBatch
    replay: Replay
    out: Tensor


@dataclass(frozen=True)
class DecodeRow:
    """One sequence's token of a decode step."""

    token_id: int
    position: int
    pages: Sequence[int]


@dataclass
class DecodeGraphs:
    """Graphs of `step`, which computes logits [S, vocabulary] of a decode batch, by batch size; captured on need."""

    step: Callable[[DeviceBatch], Tensor]
    device: torch.device
    page_size: int
    max_pages: int
    """Of one sequence."""
    capture: Capture = capture_cuda
    rehearsal: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around the first run of a step, which nobody serves: what it enters keeps the step from waiting for an answer."""
    fall_back_reason: str | None = None
    """Why steps run eagerly; None while they do not."""
    _captured: dict[int, _Captured] = field(default_factory=dict)

    def fits(self, num_sequences: int) -> bool:
        """Whether a graph may hold so many sequences."""
        return self.fall_back_reason is None and 1 <= num_sequences <= BATCH_SIZES[-1]

    def run(self, rows: Sequence[DecodeRow], before_replay: Callable[[], None] | None = None) -> Tensor:
        """Logits f32 [len(rows), vocabulary]. `before_replay` is called when only the launch is left to do.

        Raises:
            ValueError: more sequences or pages than a graph holds.
        """
        if not 1 <= len(rows) <= BATCH_SIZES[-1]:
            raise ValueError(f"a decode graph holds 1 to {BATCH_SIZES[-1]} sequences, {len(rows)} were given")
        size = BATCH_SIZES[bisect.bisect_left(BATCH_SIZES, len(rows))]
        if self.fall_back_reason is None and size not in self._captured:
            self._try_to_capture(size)
        captured = self._captured.get(size)
        if captured is None or self.fall_back_reason is not None:
            batch = self.empty_batch(len(rows))
            self.fill(batch, rows)
            return self.step(batch)
        self.fill(captured.batch, rows)
        if before_replay is not None:
            before_replay()
        captured.replay()
        return captured.out[: len(rows)]

    def fall_back(self, reason: str) -> None:
        """Run eagerly from now on, and say why once."""
        if self.fall_back_reason is None:
            self.fall_back_reason = reason
            _log.warning("decode runs without CUDA graphs from now on: %s", reason)

    def empty_batch(self, size: int) -> DeviceBatch:
        """Buffers of a batch, all padding."""
        return DeviceBatch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=self.device),
            positions=torch.zeros(size, dtype=torch.int64, device=self.device),
            places=torch.full((size,), -1, dtype=torch.int64, device=self.device),
            page_tables=torch.zeros((size, self.max_pages), dtype=torch.int32, device=self.device),
            lengths=torch.zeros(size, dtype=torch.int32, device=self.device),
        )

    def fill(self, batch: DeviceBatch, rows: Sequence[DecodeRow]) -> None:
        """Write the rows into the batch's buffers; what is left becomes padding. One copy per buffer."""
        size = len(batch.token_ids)
        tokens, positions, lengths = [0] * size, [0] * size, [0] * size
        places = [-1] * size
        tables = torch.zeros((size, self.max_pages), dtype=torch.int32)
        for i, row in enumerate(rows):
            page, offset = divmod(row.position, self.page_size)
            if page >= len(row.pages) or len(row.pages) > self.max_pages:
                raise ValueError(
                    f"position {row.position} with {len(row.pages)} pages of {self.page_size} was given; "
                    f"the page of each position and at most {self.max_pages} pages were expected"
                )
            tokens[i], positions[i], lengths[i] = row.token_id, row.position, row.position + 1
            places[i] = row.pages[page] * self.page_size + offset
            tables[i, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        batch.token_ids.copy_(torch.tensor(tokens))
        batch.positions.copy_(torch.tensor(positions))
        batch.places.copy_(torch.tensor(places))
        batch.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        batch.page_tables.copy_(tables)

    def _try_to_capture(self, size: int) -> None:
        batch = self.empty_batch(size)
        try:
            with self.rehearsal():
                self.step(batch)
            replay, out = self.capture(lambda: self.step(batch))
        except RuntimeError as error:
            self.fall_back(f"capturing a step of {size} failed ({str(error).splitlines()[0]})")
            return
        self._captured[size] = _Captured(batch, replay, out)
