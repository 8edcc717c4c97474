"""Continuous batching: chooses which tokens of which requests the next step computes.

Decoding sequences come first, one token each; then prompts are prefilled in chunks. Half of a step's prompt tokens go
to the oldest prompt, so that no request starves. The rest goes to the prompts with the fewest tokens left, so that
short ones need not wait for long ones. When pages run out, the youngest sequence is preempted: its pages and record are
freed and it starts over later (its tokens are kept). With priority scheduling each of these orders compares the
request's priority first (lower is earlier). The scheduler only decides; it computes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from twofold.engine.kv_cache import PagePool
from twofold.step.prefill_budget import PrefillBudget
from twofold.step.sequences import NOTHING_SCHEDULED, Schedule, ScheduledSequence, Sequence

_PASSED_BY_LIMIT: Final = 4
"""Others may pass a prompt that does not fit until the engine has computed this many times its tokens."""


class Scheduler:
    """Holds the waiting and running sequences."""

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_budget: PrefillBudget | None = None,
        *,
        by_priority: bool = False,
        max_adapters: int | None = None,
        draft: Callable[[Seq[ScheduledSequence], int], list[ScheduledSequence] | None] | None = None,
    ) -> None:
        """
        Args:
            draft: `Speculator.draft`; None: nothing is drafted.
            prefill_budget: bounds a step's prompt tokens by time; None: only `max_num_batched_tokens` bounds them.
            by_priority: order requests by priority before arrival; otherwise priorities are ignored.
            max_adapters: most LoRA adapters of the running sequences; None: any number.
        """
        self._by_priority = by_priority
        self._draft = draft
        self._max_adapters = max_adapters
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefill_budget = prefill_budget
        self._num_scheduled = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_decoding = 0
        """Decoding sequences in the last scheduled step."""
        self.num_decode_tokens = 0
        """Their tokens in it: one each, and drafts."""
        self._decoding = NOTHING_SCHEDULED
        """The last step's decoding sequences, without drafts; nothing once they have changed."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        sequence.num_scheduled_before = self._num_scheduled
        self._pool.estimate_hits(sequence)
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step's tokens and allocate their pages. Empty when no sequence is running and every waiting
        sequence is still loading its prefix from disk. While the same sequences decode and nothing else happens, the
        version stays the same.
        """
        if not self._reuse_last_schedule():
            self._decoding = Schedule(self._schedule_decodes())
        decoding, drafted = self._decoding.items, None
        self.num_decoding = num_tokens = len(decoding)
        if self._draft is not None and decoding:
            drafted = self._draft(decoding, self._max_num_batched_tokens - num_tokens)
            if drafted is not None:
                num_tokens = sum(item.num_tokens for item in drafted)
        self.num_decode_tokens = num_tokens
        has_prompts = bool(self.waiting) or len(decoding) < len(self.running)
        prompts = self._schedule_prefills(num_tokens) if has_prompts else []
        self._num_scheduled += sum(item.num_tokens for item in prompts) + len(decoding)
        if drafted is None and not prompts:
            return self._decoding
        return Schedule([*(drafted or decoding), *prompts])

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Remove a sequence, running or waiting, and free its pages and record. keep: False if its last step failed, so
        that nothing of it is cached."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._decoding = NOTHING_SCHEDULED
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._pool.release(sequence, keep=keep)

    def preempt_until(self, done: Callable[[], bool]) -> int:
        """Preempt sequences between two steps until `done` or none runs; they start over later. Returns how many."""
        num_preempted = 0
        while self.running and not done():
            self._preempt(max(self.running, key=self._preemption_order))
            num_preempted += 1
        return num_preempted

    def invalidate_schedule(self) -> None:
        """Invalidate the last schedule after pages were renumbered between two steps."""
        self._decoding = NOTHING_SCHEDULED

    def _reuse_last_schedule(self) -> bool:
        """Reuse the last schedule if exactly its sequences are running, all decoding, and allocate their pages. Saves
        0.1 ms per step of 16 sequences. False: schedule again."""
        if len(self._decoding.items) != len(self.running):
            return False
        page_size = self._pool.page_size
        for sequence, *_ in self._decoding.items:
            length = len(sequence.token_ids)
            if length - sequence.num_computed != 1:
                return False
            if length > page_size * len(sequence.pages):
                if not self._pool.can_grow(sequence):
                    return False
                self._pool.grow(sequence)
        return True

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        """Schedule one token per decoding sequence; the oldest get pages first."""
        scheduled: list[ScheduledSequence] = []
        decoding = [s for s in self.running if s.is_decoding]
        for sequence in sorted(decoding, key=self._preemption_order)[: self._max_num_batched_tokens]:
            if sequence in self.running and self._make_room(sequence, scheduled):
                scheduled.append(ScheduledSequence(sequence, 1, samples=True))
        return scheduled

    def _schedule_prefills(self, num_decoding: int) -> list[ScheduledSequence]:
        """Schedule prompt chunks in a step with `num_decoding` decode tokens."""
        budget = self._prefill_budget_tokens(num_decoding)
        chunks: Counter[Sequence] = Counter()
        prefixes_in_step: set[bytes | None] = set()
        prompts = [s for s in self.running if not s.is_decoding] if budget > 0 else []
        for sequence in prompts:
            self._pool.sync_prefix(sequence)
        for sequence, share in self._prefill_candidates(prompts, budget):
            room = min(share, budget - chunks.total())
            if room <= 0:
                continue
            shared = None if sequence in chunks else self._pool.next_page_digest(sequence)
            if shared in prefixes_in_step or not self._admit(sequence):
                continue
            wanted = min(chunks[sequence] + room, sequence.num_uncomputed)
            count = sequence.whole_chunk(self._pool.prefill_chunk(sequence, wanted))
            if count > wanted and chunks:  # a picture that a step without other prompts computes whole
                continue
            if shared is not None:
                prefixes_in_step.add(shared)
            chunks[sequence] = max(chunks[sequence], count)
        return [ScheduledSequence.of(sequence, count) for sequence, count in chunks.items()]

    def _prefill_budget_tokens(self, num_decoding: int) -> int:
        """Prompt-token budget of a step with `num_decoding` decode tokens."""
        room = self._max_num_batched_tokens - num_decoding
        return min(room, self._prefill_budget.num_tokens(num_decoding)) if self._prefill_budget else room

    def _prefill_candidates(self, prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """(sequence, budget share) in order: half the budget for the oldest sequence that fits, then the whole budget
        for each, fewest remaining tokens first. `prompts`: the running ones."""
        if budget > 0 and len(self.running) < self._max_num_seqs:
            prompts = prompts + self._admissible_waiting()
        first = next((s for s in sorted(prompts, key=self._preemption_order) if self._admit(s)), None)
        by_remaining = sorted(prompts, key=lambda s: (self._priority(s), s.num_uncached, s.number))
        return ([(first, -(-budget // 2))] if first else []) + [(s, budget) for s in by_remaining]

    def _admissible_waiting(self) -> list[Sequence]:
        """Waiting sequences that may be admitted: none after one that has been passed by too often."""
        admissible = []
        for sequence in sorted(self.waiting, key=self._preemption_order):
            admissible.append(sequence)
            waited = self._num_scheduled - sequence.num_scheduled_before
            fits = self._pool.can_admit(sequence) and self._has_adapter_room(sequence)
            if waited >= _PASSED_BY_LIMIT * len(sequence.token_ids) and not fits:
                break
        return admissible

    def _admit(self, sequence: Sequence) -> bool:
        """Whether the sequence runs; admits it if it was waiting and fits."""
        if sequence in self.running:
            return True
        # For the whole prompt, not just its first chunk: two half-filled prompts must not block each other.
        if len(self.running) == self._max_num_seqs or not self._has_adapter_room(sequence):
            return False
        if not self._pool.admit(sequence):
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._decoding = NOTHING_SCHEDULED
        return True

    def _has_adapter_room(self, sequence: Sequence) -> bool:
        """Whether the running sequences and this one use few enough adapters for one step."""
        if self._max_adapters is None or (adapter := sequence.request.adapter) is None:
            return True
        used = {each.request.adapter.number for each in self.running if each.request.adapter is not None}
        return adapter.number in used or len(used) < self._max_adapters

    def _make_room(self, sequence: Sequence, scheduled: list[ScheduledSequence]) -> bool:
        """Allocate pages for all tokens of `sequence`, preempting others if needed; False if it preempted itself."""
        while not self._pool.can_grow(sequence):
            in_step = {s.sequence for s in scheduled}
            candidates = [s for s in self.running if s not in in_step]
            last = max(candidates, key=self._preemption_order)
            self._preempt(last)
            if last is sequence:
                return False
        self._pool.grow(sequence)
        return True

    def _priority(self, sequence: Sequence) -> int:
        return sequence.request.priority if self._by_priority else 0

    def _preemption_order(self, sequence: Sequence) -> tuple[int, int]:
        """Sort key: the first is served first, the last is preempted first."""
        return self._priority(sequence), sequence.number

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._decoding = NOTHING_SCHEDULED
        self._pool.release(sequence)
        sequence.num_computed = 0
        sequence.was_preempted = True
        self.num_preemptions += 1
        self._pool.estimate_hits(sequence)
        self.waiting.append(sequence)
