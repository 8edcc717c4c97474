"""Continuous batching: which tokens of which requests the next step computes.

Decoding sequences come first, one token each; what is left of the token budget prefills waiting prompts in chunks.
When pages run out, the youngest sequence gives its pages back and starts over later (its text is kept). Decides
only; computes nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from twofold.kv_cache import PagePool
from twofold.types import GenerationRequest, TokenLogprob


@dataclass(eq=False)
class Sequence:
    """One request on its way through the engine."""

    number: int
    """What telemetry's native events call it."""
    request: GenerationRequest
    token_ids: list[int]
    """Prompt and answer so far."""
    max_tokens: int
    """Most tokens the answer may have."""
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's second token and on, as far as computed, if the request asks for them."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is still to be computed."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_generated > 0


@dataclass(frozen=True)
class ScheduledSequence:
    """`num_tokens` tokens of `sequence`, from `sequence.num_computed` on, take part in the step."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    """Whether the step computes the sequence's last token, so that a next one can be picked."""

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        samples = sequence.num_computed + num_tokens == len(sequence.token_ids)
        return cls(sequence, num_tokens, samples)


class Scheduler:
    """Holds the waiting and the running sequences."""

    def __init__(self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """Pick the next step's tokens and give them pages. Empty only when nothing waits or runs."""
        scheduled: list[ScheduledSequence] = []
        budget = self._max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda s: not s.is_decoding):
            if sequence not in self.running:
                continue  # gave its pages to an older one a moment ago
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
            if num_tokens > 0 and self._make_room(sequence, sequence.num_computed + num_tokens, scheduled):
                scheduled.append(ScheduledSequence.of(sequence, num_tokens))
                budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
            # Room for the whole prompt, not just its first chunk: two half-filled prompts must not block each other.
            if not self._pool.can_append(sequence.pages, len(sequence.token_ids)):
                break
            self._pool.append(sequence.pages, len(sequence.token_ids))
            self.running.append(self.waiting.popleft())
            scheduled.append(ScheduledSequence.of(sequence, num_tokens))
            budget -= num_tokens
        return scheduled

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._pool.release(sequence.pages)

    def _make_room(self, sequence: Sequence, num_tokens: int, scheduled: list[ScheduledSequence]) -> bool:
        """Give `sequence` pages for `num_tokens` tokens, preempting the youngest; False if that was itself."""
        while not self._pool.can_append(sequence.pages, num_tokens):
            in_step = {id(s.sequence) for s in scheduled}
            candidates = [s for s in self.running if id(s) not in in_step]
            youngest = max(candidates, key=lambda s: s.number)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._pool.append(sequence.pages, num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._pool.release(sequence.pages)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
