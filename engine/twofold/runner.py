"""A model, its KV cache and its experts' runtime as one thing that computes a scheduled step.

Builds the flattened batch, computes it, and lets each request's sampler pick from its row of logits. Decides nothing.
`Runner` is what the engine asks; `ModelRunner` answers on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twofold import ops
from twofold.experts.moe import MoeRuntime
from twofold.model import BatchMeta, LoadedModel
from twofold.sampler import Sampler
from twofold.scheduler import ScheduledSequence


class Runner(Protocol):
    """Computes scheduled steps on whatever device. The engine's thread owns it."""

    @property
    def moe(self) -> MoeRuntime: ...
    @property
    def team(self) -> ops.ThreadTeam: ...
    @property
    def vocab_size(self) -> int: ...

    @property
    def sampling_s(self) -> float:
        """Spent on picking tokens, since the start."""

    @property
    def batch_s(self) -> float:
        """Spent on putting batches together, since the start; 0 where a device computes beside it."""

    def forward(self, step: int, scheduled: Seq[ScheduledSequence], samplers: Seq[Sampler]) -> list[int]:
        """Compute the step's tokens and pick the next ones.

        Args:
            samplers: one for each item that samples, in order.

        Returns:
            the picked tokens, in the samplers' order.

        Raises:
            TwofoldError, ValueError, RuntimeError, MemoryError: the step's requests cannot go on.
        """


@dataclass(frozen=True)
class LoadedRunner:
    """A runner and the sizes it was made for."""

    runner: Runner
    num_pages: int
    max_context: int
    """Longest prompt plus answer of one request, in tokens."""
    reason: str = ""
    """What was chosen for it, for people."""


class ModelRunner:
    """A model, its KV cache and where its experts run, on the CPU. See `Runner`."""

    def __init__(self, model: LoadedModel, moe: MoeRuntime, kv_cache: ops.KvCache) -> None:
        self.moe = moe
        self.team = model.team
        self.vocab_size = model.config.vocab_size
        self.sampling_s = 0.0
        self.batch_s = 0.0
        self._model = model
        self._kv_cache = kv_cache

    def forward(self, step: int, scheduled: Seq[ScheduledSequence], samplers: Seq[Sampler]) -> list[int]:
        """See `Runner.forward`."""
        began = time.perf_counter()
        tokens: list[int] = []
        positions: list[int] = []
        sequence_index: list[int] = []
        requests: list[int] = []
        last_rows: list[int] = []
        for index, item in enumerate(scheduled):
            sequence, begin = item.sequence, item.sequence.num_computed
            end = begin + item.num_tokens
            tokens += sequence.token_ids[begin:end]
            positions += range(begin, end)
            sequence_index += [index] * item.num_tokens
            requests += [sequence.number] * item.num_tokens
            if item.samples:
                last_rows.append(len(tokens) - 1)
        batch = BatchMeta(
            positions=np.array(positions, np.int32),
            sequence_index=np.array(sequence_index, np.int32),
            page_tables=_page_tables(scheduled),
            prompt_lengths=np.array([item.sequence.num_prompt_tokens for item in scheduled], np.int32),
        )
        self.moe.begin_step(step, requests, positions)
        self.batch_s += time.perf_counter() - began
        hidden = self._model.forward(np.array(tokens, np.int32), batch, self._kv_cache, self.moe.executor)
        logits = self._model.logits(hidden[last_rows])
        self.moe.end_step()
        began = time.perf_counter()
        picked = [sampler.sample(row) for sampler, row in zip(samplers, logits, strict=True)]
        self.sampling_s += time.perf_counter() - began
        return picked


def _page_tables(scheduled: Seq[ScheduledSequence]) -> npt.NDArray[np.int32]:
    """[sequences, most pages]; unused entries are 0 and never read."""
    pages = [item.sequence.pages for item in scheduled]
    if len(pages) == 1:
        return np.array(pages, np.int32)
    tables = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, own in zip(tables, pages, strict=True):
        row[: len(own)] = own
    return tables
