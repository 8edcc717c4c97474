"""Computes a scheduled step with a model, its KV cache and its experts' runtime.

Builds the flattened batch, computes it, and lets each request's sampler pick from its row of logits. Decides nothing.
`Runner` is the interface to the engine; `ModelRunner` implements it on the CPU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from twofold.api.config import EngineConfig
from twofold.api.control import MemorySplit
from twofold.blocks import ops
from twofold.experts.moe import MoeRuntime
from twofold.experts.placement import Mask
from twofold.step.adapters import AdaptedModel
from twofold.step.batch import StepBatch, next_ids_of
from twofold.step.model import LoadedModel
from twofold.step.mtp_runner import MtpRunner
from twofold.step.pooling import Pooler
from twofold.step.sampler import Sampler, SamplerBatch, SpeculativePicks, logprobs
from twofold.step.sequences import Schedule, ScheduledSequence
from twofold.step.state_memory import StateMemory

F32 = npt.NDArray[np.float32]


class Runner(Protocol):
    """Computes scheduled steps on any device. Owned by the engine's thread."""

    @property
    def moe(self) -> MoeRuntime: ...
    @property
    def pool(self) -> ops.ThreadPool: ...
    @property
    def vocab_size(self) -> int: ...

    @property
    def sampling_s(self) -> float:
        """Time spent sampling since the start."""

    @property
    def batch_s(self) -> float:
        """Time spent building batches since the start; 0 where a device computes meanwhile."""

    def forward(self, step: int, schedule: Schedule, samplers: Seq[Sampler]) -> list[int]:
        """Compute the step's tokens and pick the next ones; keep requested log probabilities.

        Those of picked tokens are in `Sampler.logprob` afterwards, those of the prompt in `Sequence.prompt_logprobs`.
        Hidden states that are pooled are in `Sequence.pooler`.

        Args:
            samplers: one per item that samples, in order; the same ones for the same version of the schedule.

        Returns:
            the picked tokens, in the samplers' order: of a sequence with drafts, the token after its newest one.

        Raises:
            TwofoldError, ValueError, RuntimeError, MemoryError: the step's requests cannot continue.
        """

    # ---- between two steps: changing the memory split ----------------------------------------------------------------

    def resize_pages(self, num_pages: int, places: Mapping[int, int], *, keep_records: bool = True) -> None:
        """Resize to `num_pages` pages: page places[p] receives the contents of page p, all others are undefined.
        Records stay; without keep_records they are reset, and host memory for them is not committed yet.

        Raises:
            TwofoldError: there is no room; nothing has changed.
        """

    def release_slots(self) -> None:
        """See `MoeRuntime.release`."""

    def allocate_slots(self, num_slots: int, num_staging: int) -> None:
        """See `MoeRuntime.allocate`."""

    def place_experts(self, mask: Mask) -> int:
        """See `MoeRuntime.place_experts`."""


class Verifier(Protocol):
    """Methods of a runner that computes steps with drafts, besides `Runner`'s."""

    def pick_verified(self, rows: Seq[int], samplers: Seq[Sampler]) -> list[int]:
        """Pick the tokens after accepted drafts of the last `forward`.

        Args:
            rows: rows of logits, counted over the samplers of `forward`, each with one row and one more per draft.
            samplers: one per row.

        Raises:
            KernelError: the native code failed.
        """


Follower = Callable[[Seq[ScheduledSequence], Seq[F32]], None]
"""Takes a computed step and its tapped hidden states, each [T, hidden]."""

Planner = Callable[[EngineConfig, int], MemorySplit]
"""Plans the sizes for a configuration, given the number of KV cache pages in use. ConfigError: it does not fit; the
message says what would."""


@dataclass(frozen=True)
class LoadedRunner:
    """A runner and its sizes."""

    runner: Runner
    num_pages: int
    max_context: int
    """Longest prompt plus answer of one request, in tokens."""
    memory: StateMemory
    """Memory of its pages and records."""
    reason: str = ""
    """Why these sizes were chosen, for display."""
    num_records: int | None = None
    """Maximum number of running sequences where each needs a record; None where none does."""
    num_snapshots: int = 0
    """Records that the prefix cache can keep in addition."""
    plan: Planner | None = None
    """None: the sizes are fixed."""
    page_bytes: int = 0
    """Bytes per page, all layers."""
    record_bytes: int = 0
    """Bytes per sequence record, all layers."""
    draft_records: range = range(0)
    """Numbers of further records, for the state after each draft of a step."""
    own_record_first: bool = False
    """Whether the sequence's own record receives the state after the first token of such a step, not after the last."""
    verifier: Verifier | None = None
    """None: steps with drafts cannot be computed."""
    mtp_runner: MtpRunner | None = None
    """Drafts with the model's MTP layer; None: it is not run."""
    num_moe_layers: int | None = None
    """MoE layers of a step, without an MTP layer's; None: all."""
    adapters: AdaptedModel | None = None
    """Where adapters are put; None: the runner computes none."""


class ModelRunner:
    """Runs a model, its KV cache and its experts' runtime on the CPU. See `Runner` and `Verifier`."""

    def __init__(self, model: LoadedModel, moe: MoeRuntime, kv_cache: ops.StateCache) -> None:
        self.moe = moe
        layer = model.mtp
        self.mtp_runner = None if layer is None else MtpRunner(model, layer, moe, kv_cache)
        """Drafts with the model's MTP layer; None: it has none."""
        self.pool = model.pool
        self.vocab_size = model.config.vocab_size
        self.sampling_s = 0.0
        self.batch_s = 0.0
        self._model = model
        self._kv_cache = kv_cache
        self._batch = StepBatch(model.num_ids)
        self._samplers = SamplerBatch(())
        self._samplers_version: int | None = None
        """Schedule that they are for."""
        self._logits: F32 = np.empty((0, 0), np.float32)
        self._ahead: SpeculativePicks | None = None
        """Tokens of the last step's rows, picked at once; None: they are picked as they are verified."""
        self.follower: Follower | None = None
        """Receives each step's tapped hidden states."""

    @property
    def embedding(self) -> ops.Embedding:
        return self._model.embedding

    def forward(self, step: int, schedule: Schedule, samplers: Seq[Sampler]) -> list[int]:
        began = time.perf_counter()
        scheduled, batch = schedule.items, self._batch.of(schedule)
        prepared = self._model.attention_batch(batch.meta)
        self._model.adapters.set(batch.adapters)  # before the step is priced
        self.moe.begin_step(
            step, batch.requests, batch.positions, batch.generated, batch.verified, batch.pictures
        )
        self.batch_s += time.perf_counter() - began
        if not batch.continues_decode and len(ahead := next_ids_of(scheduled, self._model.num_ids)):
            self._model.read_ahead(ahead)
        hidden = self._model.forward(
            batch.token_ids, prepared, self._kv_cache, self.moe.executor, batch.media, batch.meta.ids
        )
        if self.follower is not None:
            self.follower(scheduled, self._model.tapped)
        if batch.continues_decode:  # decode only: no prompt log probabilities to report
            logits = self._model.logits(hidden)
        else:
            logits_of = functools.partial(self._logits_of, hidden, batch.adapters)
            pool_prompts(scheduled, lambda rows: self._model.final_states(hidden[rows]), logits_of)
            report_prompts(self.pool, scheduled, logits_of)
            logits = logits_of(batch.last_rows)
        if batch.adapters:  # drafts use none
            self._model.adapters.set([])
        self.moe.executor.end_step()
        if self.mtp_runner is not None:
            self.mtp_runner.follow(step, scheduled, hidden)
        began = time.perf_counter()
        self._logits = logits
        if batch.first_rows is None:
            if schedule.version != self._samplers_version:
                self._samplers, self._samplers_version = SamplerBatch(samplers), schedule.version
            picked = self._samplers.pick(self.pool, logits)
        else:
            counts = [1 + len(item.drafts) for item in scheduled if item.samples]
            self._ahead = SpeculativePicks.of(self.pool, samplers, counts, logits)
            picked = self.pick_verified(batch.first_rows, samplers)
        self.sampling_s += time.perf_counter() - began
        return picked

    def _logits_of(self, hidden: F32, adapters: Seq[int], rows: list[int]) -> F32:
        """Logits of some of a step's rows, whose adapters are those of all its rows."""
        if adapters:
            self._model.adapters.set([adapters[row] for row in rows])
        return self._model.logits(hidden[rows])

    def pick_verified(self, rows: Seq[int], samplers: Seq[Sampler]) -> list[int]:
        if self._ahead is not None and (tokens := self._ahead.take(rows, samplers)) is not None:
            return tokens
        began = time.perf_counter()
        picked = SamplerBatch(samplers).pick(self.pool, self._logits[list(rows)])
        self.sampling_s += time.perf_counter() - began
        return picked

    def resize_pages(self, num_pages: int, places: Mapping[int, int], *, keep_records: bool = True) -> None:
        self._kv_cache.resize(num_pages, places, keep_records)

    def release_slots(self) -> None:
        self.moe.release()

    def allocate_slots(self, num_slots: int, num_staging: int) -> None:
        self.moe.allocate(num_slots, num_staging)

    def place_experts(self, mask: Mask) -> int:
        return self.moe.place_experts(mask)


_MAX_ROWS: Final = 64
"""Prompt rows whose logits are in memory at a time: 39 MB at 151,936 entries."""


def pool_prompts(
    scheduled: Seq[ScheduledSequence],
    states: Callable[[list[int]], F32],
    logits: Callable[[list[int]], F32],
) -> None:
    """Pass hidden states that this step computed to the poolers of their requests.

    Args:
        states: hidden states after the last norm [rows, hidden] of the given rows of the step.
        logits: logits [rows, vocabulary] of the given rows. Both are called for few rows at a time.
    """
    of_states: list[tuple[Pooler, int]] = []
    of_logits: list[tuple[Pooler, int]] = []
    row = 0
    for item in scheduled:
        pooler, begin = item.sequence.pooler, item.sequence.num_computed
        if pooler is not None:
            wanted = of_logits if pooler.pooling.tokens else of_states
            wanted += [(pooler, row + at - begin) for at in pooler.wanted(begin, begin + item.num_tokens)]
        row += item.num_tokens
    for compute, rows in ((states, of_states), (logits, of_logits)):
        for at in range(0, len(rows), _MAX_ROWS):
            part = rows[at : at + _MAX_ROWS]
            for (pooler, _), values in zip(part, compute([each for _, each in part]), strict=True):
                pooler.add(values)


def report_prompts(
    pool: ops.ThreadPool, scheduled: Seq[ScheduledSequence], logits: Callable[[list[int]], F32]
) -> None:
    """Append the log probabilities of prompt tokens that this step computed, for requests that ask for them.

    Args:
        logits: logits [rows, vocabulary] of the given rows of the step; called for few rows at a time.
    """
    row = 0
    for item in scheduled:
        sequence, begin = item.sequence, item.sequence.num_computed
        num_top = sequence.request.sampling.prompt_logprobs
        if num_top is not None:
            # A row predicts the token after it. Rows reported before a preemption are kept.
            first = max(begin, len(sequence.prompt_logprobs))
            end = min(begin + item.num_tokens, sequence.num_prompt_tokens - 1)
            for at in range(first, end, _MAX_ROWS):
                places = range(at, min(at + _MAX_ROWS, end))
                found = logits([row + place - begin for place in places])
                tokens = [sequence.token_ids[place + 1] for place in places]
                count = len(places)
                sequence.prompt_logprobs += logprobs(
                    pool, found, rows=range(count), tokens=tokens, num_top=[num_top] * count
                )
        row += item.num_tokens
