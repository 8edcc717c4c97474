"""EAGLE-3: a head of one layer that drafts from three of the target's hidden states (`eagle3_head`).

The head computes position p of a text from the target's states there and the token at p + 1, so it lags behind by the
tokens whose next one is not known. Positions of prompts are computed in the step that computes the prompt. States of
decoded tokens are kept until a draft is wanted, or until there are many. Where the target skips tokens that are in its
prefix cache, the head begins after them: its keys and values have positions of their own, because rotations depend on
distances alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from twofold.api.speculative_config import MAX_DEPTH
from twofold.blocks import ops
from twofold.step.batch import page_tables
from twofold.step.drafters.draft_pages import DraftPagePool, DraftPages
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.drafters.eagle3_head import Eagle3Head
from twofold.step.drafters.likeliest import likeliest
from twofold.step.drafters.pass_times import PassTimes
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import ScheduledSequence, Sequence

F32 = npt.NDArray[np.float32]

MAX_PENDING_STATES: Final = 64
"""Decoded tokens of a sequence whose states are kept before they are computed without a draft."""
_LEAST_CHANCE: Final = 0.1
"""A draft ends where its tokens are right together with less than this chance."""


@dataclass(slots=True, eq=False)
class _Followed:
    """A sequence's states that the head has not computed."""

    held: DraftPages
    begin: int
    """Target position of the head's position 0."""
    kept_at: int
    """Target position of the first kept state."""
    kept: F32
    """[positions, 3 * hidden]"""

    def add(self, begin: int, rows: F32) -> bool:
        """Add the states from target position `begin` on, instead of those that were kept there. False: positions
        before them are missing."""
        if begin < self.kept_at:  # computed again, after a preemption
            rows, begin = rows[self.kept_at - begin :], self.kept_at
        if begin > self.kept_at + len(self.kept):
            return False
        if len(rows):
            self.kept = np.concatenate([self.kept[: begin - self.kept_at], rows])
        return True


class _Part(NamedTuple):
    """Consecutive positions of one sequence that a pass computes."""

    held: DraftPages
    begin: int
    """The head's position of the first."""
    tokens: Seq[int]


class Eagle3Drafter(ModelDrafter):
    """See `ModelDrafter`. `follow` is called after each step of the target."""

    def __init__(
        self,
        head: Eagle3Head,
        cache: ops.StateCache,
        pages: DraftPagePool,
        times: PassTimes,
        *,
        stops_early: bool = True,
    ) -> None:
        """stops_early: end a draft whose tokens have become unlikely."""
        self._head, self._cache, self.pages = head, cache, pages
        self._times = times
        self._stops_early = stops_early
        self._followed: dict[int, _Followed] = {}

    def pass_s(self, num_sequences: int) -> float:
        return self._times.pass_s(num_sequences)

    def release(self, sequence: Sequence) -> None:
        self._followed.pop(sequence.number, None)
        self.pages.release(sequence)

    def follow(self, scheduled: Seq[ScheduledSequence], states: Seq[F32]) -> None:
        """Take over the target's states of a computed step, which is not verified yet: each [T, hidden]."""
        joined = np.concatenate(states, axis=1)
        due: list[tuple[_Followed, int, Sequence]] = []
        row = 0
        for item in scheduled:
            sequence, rows = item.sequence, joined[row : row + item.num_tokens]
            row += item.num_tokens
            if sequence.request.prediction or sequence.request.return_routed_experts:
                continue
            begin = sequence.num_computed
            followed = self._followed.get(sequence.number)
            if followed is None or not followed.add(begin, rows):
                held = self.pages.of(sequence)
                held.num_known = 0
                followed = self._followed[sequence.number] = _Followed(held, begin, begin, rows.copy())
            # Rows before `begin` are verified; those of a prompt are known.
            end = begin if sequence.is_decoding else min(begin + item.num_tokens, len(sequence.token_ids) - 1)
            if not sequence.is_decoding or end - followed.kept_at >= MAX_PENDING_STATES:
                due.append((followed, end - followed.kept_at, sequence))
        self._catch_up([each for each in due if each[1] > 0])

    def propose_all(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        wanted = []
        for number, (sequence, depth) in enumerate(zip(sequences, depths, strict=True)):
            followed = self._followed.get(sequence.number)
            if followed is not None and sequence.num_computed > followed.kept_at:
                wanted.append((number, depth, followed, sequence.num_computed - followed.kept_at, sequence))
        ready = self._with_pages([(each[2], each[3], each[1] - 1, each[4]) for each in wanted])
        wanted = [each for each, is_ready in zip(wanted, ready, strict=True) if is_ready]
        drafts: list[Draft] = [NOTHING] * len(sequences)
        if not wanted:
            return drafts
        parts, states = self._taken(
            [(followed, count, sequence) for _, _, followed, count, sequence in wanted]
        )
        made = self._chained(parts, states, [depth for _, depth, *_ in wanted])
        for (number, *_), draft in zip(wanted, made, strict=True):
            drafts[number] = draft
        return drafts

    def _catch_up(self, due: Seq[tuple[_Followed, int, Sequence]]) -> None:
        """Compute kept positions of which the next token is known: so many of each."""
        ready = self._with_pages([(followed, count, 0, sequence) for followed, count, sequence in due])
        for (followed, count, _), is_ready in zip(due, ready, strict=True):
            if not is_ready:  # it restarts after them
                followed.kept_at, followed.kept = followed.kept_at + count, followed.kept[count:]
        due = [each for each, is_ready in zip(due, ready, strict=True) if is_ready]
        if due:
            self._timed(*self._taken(due))

    def _with_pages(self, wanted: Seq[tuple[_Followed, int, int, Sequence]]) -> list[bool]:
        """Allocate pages for (sequence's kept positions, further ones); False where there are too few."""
        in_use = list[DraftPages]()
        found = []
        for followed, count, further, sequence in wanted:
            followed.held = self.pages.of(sequence)
            if (
                followed.begin + followed.held.num_known != followed.kept_at
            ):  # another sequence took its pages
                followed.begin, followed.held.num_known = followed.kept_at, 0
            found.append(
                self.pages.grow(followed.held, followed.held.num_known + count + max(further, 0), in_use)
            )
            in_use.append(followed.held)
        return found

    def _taken(self, due: Seq[tuple[_Followed, int, Sequence]]) -> tuple[list[_Part], F32]:
        """Parts of so many kept positions, which are no longer kept, and their fused states."""
        parts, rows = [], []
        for followed, count, sequence in due:
            tokens = sequence.token_ids[followed.kept_at + 1 : followed.kept_at + 1 + count]
            parts.append(_Part(followed.held, followed.held.num_known, tokens))
            rows.append(followed.kept[:count])
            followed.held.num_known += count
            followed.kept_at += count
            followed.kept = followed.kept[count:].copy()
        return parts, self._head.fused(np.concatenate(rows))

    def _chained(self, parts: list[_Part], states: F32, depths: Seq[int]) -> list[Draft]:
        """A draft after each part: the first pass computes the parts, each later one the newest drafted tokens."""
        tokens = [list[int]() for _ in parts]
        chances = [list[float]() for _ in parts]
        together = np.ones(len(parts))
        active = list(range(len(parts)))
        while active:
            out = self._timed(parts, states)
            ends = np.cumsum([len(part.tokens) for part in parts]) - 1
            picked, probable = likeliest(self._head.logits(out[ends]))
            parts_before, active_before = parts, active
            parts, active, rows = [], [], []
            for row, number in enumerate(active_before):
                token = int(self._head.target_tokens[picked[row]])
                tokens[number].append(token)
                chances[number].append(probable[row])
                together[number] *= probable[row]
                is_likely = not self._stops_early or together[number] >= _LEAST_CHANCE
                if len(tokens[number]) < depths[number] and is_likely:
                    before = parts_before[row]
                    parts.append(_Part(before.held, before.begin + len(before.tokens), [token]))
                    active.append(number)
                    rows.append(ends[row])
            states = out[rows]
        return [Draft(tuple(own), tuple(theirs)) for own, theirs in zip(tokens, chances, strict=True)]

    def _timed(self, parts: Seq[_Part], states: F32) -> F32:
        """A pass. Learns its time."""
        began = time.perf_counter()
        counts = [len(part.tokens) for part in parts]
        positions = [at for part in parts for at in range(part.begin, part.begin + len(part.tokens))]
        out = self._head.forward(
            [token for part in parts for token in part.tokens],
            states,
            positions=np.array(positions, np.int32),
            sequences=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            tables=page_tables([part.held.pages for part in parts]),
            cache=self._cache,
        )
        took_s = time.perf_counter() - began
        self.spent_s += self._times.observe(
            len(parts), len(positions), took_s, is_long=max(counts) > MAX_DEPTH + 1
        )
        return out
