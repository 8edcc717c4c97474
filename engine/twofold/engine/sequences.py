"""A request on its way through the scheduler: its tokens, how far they are computed, what of the cache is its own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from twofold.api.types import GenerationRequest, TokenLogprob
from twofold.engine.page_tree import CachedPage


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on its way through the engine."""

    number: int
    """In order of arrival; what telemetry's native events call it."""
    request: GenerationRequest
    token_ids: list[int]
    """Prompt and answer so far."""
    max_tokens: int
    """Most tokens the answer may have."""
    pages: list[int] = field(default_factory=list)
    """Of its tokens, in order: those of `cached`, then its own."""
    cached: list[CachedPage] = field(default_factory=list)
    """Leading pages that others may share."""
    digests: list[bytes] = field(default_factory=list)
    """Of its full pages, each with all before it, as far as they were needed."""
    record: int | None = None
    """The number of its record in the cache, while it runs."""
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    num_cached: int = 0
    """Tokens of the prompt that others had computed."""
    num_found: int = 0
    """Tokens that were in the cache when it was looked up last, waiting."""
    last_snapshot: int = 0
    """Leading tokens behind which its record is in the cache."""
    was_preempted: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's second token and on, as far as computed, if the request asks for them."""
    queued_at: int = 0
    """Tokens that the engine had computed when this came."""
    submitted_s: float = field(default_factory=time.time)
    """Unix time."""
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def num_left(self) -> int:
        """Tokens still to be computed before the next one can be picked."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_expected(self) -> int:
        """The same, of a sequence that waits without what it has been found to share."""
        return self.num_left - (0 if self.pages else self.num_found)

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is still to be computed."""
        return self.num_left == 1 and self.num_generated > 0


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of `sequence`, from `sequence.num_computed` on, take part in the step."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    """Whether the step computes the sequence's last token, so that a next one can be picked."""

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        return cls(sequence, num_tokens, samples=num_tokens == sequence.num_left)
