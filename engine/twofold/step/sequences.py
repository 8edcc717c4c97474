"""A request in the scheduler: its tokens, its progress and its KV cache pages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from twofold.api.types import GenerationRequest, TokenLogprob
from twofold.step.drafts import DraftState
from twofold.step.page_tree import CachedPage
from twofold.step.pooling import Pooler


class PendingStates:
    """Hidden states of consecutive positions that the model's MTP layer has not computed."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        """The first position."""
        self._rows: list[npt.NDArray[np.float32]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def is_before(self, position: int) -> bool:
        """Whether states of all positions from `begin` up to this one are kept."""
        return self.begin <= position <= self.begin + self._count

    def cut(self, position: int) -> None:
        """Drop states from `position` on: those of rejected drafts."""
        while self.begin + self._count > position:
            last = self._rows.pop()
            self._count -= len(last)
            self.add(last[: max(0, position - self.begin - self._count)])

    def add(self, rows: npt.NDArray[np.float32]) -> None:
        """Keep the states [n, hidden] of the next n positions."""
        if len(rows):
            self._rows.append(rows)
            self._count += len(rows)

    def take(self) -> npt.NDArray[np.float32]:
        """All states [n, hidden]; the next ones are kept from the position after them on."""
        taken = self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)
        self.begin += self._count
        self._rows, self._count = [], 0
        return taken


@dataclass(eq=False, slots=True)
class Sequence:
    """One request inside the engine."""

    number: int
    """Order of arrival; identifies the request in native telemetry events."""
    request: GenerationRequest
    token_ids: list[int]
    """Prompt and answer so far."""
    max_tokens: int
    """Most tokens the answer may have."""
    pages: list[int] = field(default_factory=list)
    """Pages of its tokens, in order: those of `cached`, then its own."""
    cached: list[CachedPage] = field(default_factory=list)
    """Leading pages shared through the prefix cache."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of its full pages, each covering all pages before it; computed as needed."""
    bidirectional: tuple[tuple[int, int], ...] = ()
    """(begin, end) of tokens that attend to one another, so that one step computes them all: ascending, apart."""
    record: int | None = None
    """Number of its record in the cache, while it runs."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    num_cached: int = 0
    """Prefix-cache hits, tokens."""
    num_lookup_hits: int = 0
    """Prefix-cache hits at the last lookup while waiting, tokens."""
    last_snapshot: int = 0
    """Number of leading tokens at the last snapshot of its record."""
    was_preempted: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities from the prompt's second token on, as far as computed, if requested."""
    num_scheduled_before: int = 0
    """Tokens the engine had computed when this request arrived."""
    submitted_s: float = field(default_factory=time.time)
    """Unix time."""
    drafting: DraftState | None = None
    """State of its drafter, once it has one."""
    pending_states: PendingStates | None = None
    """Positions that the MTP layer has to compute before the next draft; None: no such layer."""
    num_accepted: int = 0
    """Drafted tokens that became part of the answer."""
    num_rejected: int = 0
    """Drafted tokens that were computed in vain."""
    num_prompt_tokens: int = field(init=False)
    pooler: Pooler | None = field(init=False)
    """Pools the prompt's hidden states; None: an answer is generated."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        pooling = self.request.pooling
        self.pooler = None if pooling is None else Pooler(pooling, self.num_prompt_tokens)

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one can be picked."""
        return len(self.token_ids) - self.num_computed

    def visible_end(self, position: int) -> int:
        """Position after the last one that the token at `position` attends to in bidirectional layers."""
        return next((end for begin, end in self.bidirectional if begin <= position < end), position + 1)

    def whole_chunk(self, num_tokens: int) -> int:
        """About `num_tokens` tokens, the next to compute, that no step boundary may cut: fewer, where others come
        before the bidirectional ones, else more."""
        begin, last = self.num_computed, self.num_computed + num_tokens - 1
        for first, end in self.bidirectional:
            if first <= last < end - 1:
                return first - begin if first > begin else end - begin
        return num_tokens

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncached(self) -> int:
        """As `num_uncomputed`; for a waiting sequence minus its expected prefix-cache hits."""
        return self.num_uncomputed - (0 if self.pages else self.num_lookup_hits)

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is left to compute."""
        return self.num_uncomputed == 1 and self.num_generated > 0


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of `sequence`, starting at `sequence.num_computed`, in the step; the last of them are
    drafts."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    """Whether the step computes the sequence's last token, so that the next one can be picked."""
    drafts: tuple[int, ...] = ()
    """Proposed tokens after the sequence's last one, which the step verifies."""
    records: tuple[int, ...] = ()
    """Records that receive the state after each of `num_tokens` tokens, one of them its own (`own_record_first`); empty
    where layers keep none."""

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        is_last = num_tokens == sequence.num_uncomputed
        return cls(sequence, num_tokens, samples=is_last and sequence.pooler is None)


_versions: Final = itertools.count()


@dataclass(frozen=True)
class Schedule:
    """Which tokens of which sequences a step computes."""

    items: Seq[ScheduledSequence]
    """Decoding sequences first; never changed."""
    version: int = field(default_factory=lambda: next(_versions))
    """Unique per schedule in this process. A step with the last step's version computes the next token of the same
    sequences, one each, so that whatever was derived from `items` may be reused."""


NOTHING_SCHEDULED: Final = Schedule(())
