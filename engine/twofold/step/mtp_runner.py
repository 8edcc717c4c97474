"""Keeps a model's MTP layer in step with the model, and drafts tokens with it.

The layer computes position p from the model's hidden state there and the token at p + 1. So after each step it lags
behind by the tokens whose next one was not known. Positions of prompts are computed in the step that computes the
prompt. Hidden states of decoded tokens are kept with the sequence until a draft is wanted, or until there are many: a
sequence that is not drafted costs one pass per `MAX_PENDING_STATES` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.experts.moe import MoeRuntime
from twofold.step.batch import page_tables
from twofold.step.drafts import NOTHING, Draft
from twofold.step.model import BatchMeta, LoadedModel
from twofold.step.mtp_layer import MtpLayer
from twofold.step.sequences import PendingStates, ScheduledSequence, Sequence

F32 = npt.NDArray[np.float32]

MAX_PENDING_STATES: Final = 64
"""Positions of a sequence whose hidden states are kept at most, before those of the newest step."""
_GREEDY: Final = (0.0, 0, 1.0, 0.0, 0.0)


class _Part(NamedTuple):
    """Positions of one sequence from `begin` on, and the hidden states that the layer reads there."""

    sequence: Sequence
    begin: int
    previous: F32


@dataclass(slots=True)
class _Drafting:
    """A sequence's draft so far, and the positions computed before its first token."""

    part: _Part
    depth: int
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def next_part(self, previous: F32) -> _Part:
        """The position of the newest drafted token's predecessor."""
        sequence = self.part.sequence
        return _Part(sequence, sequence.num_computed + len(self.tokens) - 1, previous)


def _is_drafted(sequence: Sequence) -> bool:
    return not (sequence.request.prediction or sequence.request.return_routed_experts)


class MtpRunner:
    """The MTP layer of one runner's model. Owned by the engine's thread."""

    def __init__(
        self, model: LoadedModel, layer: MtpLayer, moe: MoeRuntime, kv_cache: ops.StateCache
    ) -> None:
        self._model, self._layer = model, layer
        self._moe, self._kv_cache = moe, kv_cache
        self._step = 0
        self.num_rows = 0
        """Positions computed since the start."""

    def follow(self, step: int, scheduled: Seq[ScheduledSequence], hidden: F32) -> None:
        """Take over the hidden states of a step that has been computed: compute positions whose next token is known
        from a prompt, keep the others.

        Raises KernelError if the native code failed.
        """
        self._step = step
        states = self._model.states(hidden)
        parts: list[_Part] = []
        row = 0
        for sequence, num_tokens, _, _, _ in scheduled:
            rows, row = states[row : row + num_tokens], row + num_tokens
            begin = sequence.num_computed
            if not sequence.is_decoding:
                known = min(num_tokens, len(sequence.token_ids) - 1 - begin)
                if (earlier := self._kept(sequence)) is not None:  # a preempted answer
                    parts.append(earlier)
                if known > 0:
                    parts.append(_Part(sequence, begin, rows[:known]))
                rows, begin = rows[known:], begin + known
                sequence.pending_states = PendingStates(begin)
            if len(rows) and _is_drafted(sequence):
                self._keep(sequence, begin, rows, parts)
        if parts:
            self._forward(parts)
            self._moe.executor.end_step(with_head=False)

    def _keep(self, sequence: Sequence, begin: int, rows: F32, parts: list[_Part]) -> None:
        """Keep hidden states from position `begin` on; if there are many before it, those become a part."""
        kept = sequence.pending_states
        if kept is None or not kept.is_before(begin):
            kept = sequence.pending_states = PendingStates(begin)
        kept.cut(begin)
        if len(kept) >= MAX_PENDING_STATES:
            parts.append(_Part(sequence, kept.begin, kept.take()))
        kept.add(rows.copy())

    def settle(self, sequence: Sequence) -> None:
        """Compute all kept positions of a sequence, whose pages others may read from now on."""
        part = self._kept(sequence)
        if part is not None:
            self._forward([part])
            self._moe.executor.end_step(with_head=False)

    @property
    def virtual_now_us(self) -> float | None:
        """Time of an emulated accelerator's virtual clock; None in real time."""
        return self._moe.virtual_now_us

    def draft(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """The likeliest tokens after each sequence's newest one, one pass per token. All their positions but the last
        have pages."""
        active = [
            _Drafting(part, depth)
            for sequence, depth in zip(sequences, depths, strict=True)
            if (part := self._kept(sequence)) is not None
        ]
        found = {each.part.sequence.number: each for each in active}
        if active:
            hidden = self._forward([each.part for each in active])
            last = np.cumsum([len(each.part.previous) for each in active]) - 1
            hidden, states = hidden[last], self._layer.states(hidden)[last]
        while active:
            for each, token, chance in zip(active, *self._pick(hidden), strict=True):
                each.tokens.append(token)
                each.chances.append(chance)
            self._moe.executor.end_step()
            rows = [row for row, each in enumerate(active) if len(each.tokens) < each.depth]
            active = [active[row] for row in rows]
            if active:
                parts = [
                    each.next_part(states[row : row + 1]) for row, each in zip(rows, active, strict=True)
                ]
                hidden = self._forward(parts, [each.tokens[-1] for each in active])
                states = self._layer.states(hidden)
        made = (found.get(sequence.number) for sequence in sequences)
        return [NOTHING if each is None else Draft(tuple(each.tokens), tuple(each.chances)) for each in made]

    def _kept(self, sequence: Sequence) -> _Part | None:
        """All kept positions of the sequence, which are no longer kept; None if there are none."""
        kept = sequence.pending_states
        if kept is None or not kept.is_before(sequence.num_computed):
            return None
        kept.cut(sequence.num_computed)
        return _Part(sequence, kept.begin, kept.take()) if len(kept) else None

    def _forward(self, parts: Seq[_Part], tokens: Seq[int] | None = None) -> F32:
        """The layer's hidden states of these positions. tokens: for parts of one position, the token after it; None:
        the sequence's own."""
        counts = [len(part.previous) for part in parts]
        positions = [
            at
            for part, count in zip(parts, counts, strict=True)
            for at in range(part.begin, part.begin + count)
        ]
        if tokens is None:
            tokens = [
                token
                for part, count in zip(parts, counts, strict=True)
                for token in part.sequence.token_ids[part.begin + 1 : part.begin + count + 1]
            ]
        batch = BatchMeta(
            positions=np.array(positions, np.int32),
            sequence_index=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            page_tables=page_tables([part.sequence.pages for part in parts]),
            prompt_lengths=np.array([part.sequence.num_prompt_tokens for part in parts], np.int32),
            records=np.array([part.sequence.record or 0 for part in parts], np.int32),
        )
        self.num_rows += len(positions)
        requests = np.repeat([part.sequence.number for part in parts], counts).tolist()
        self._moe.begin_step(self._step, requests, positions, is_recorded=False)
        previous = np.concatenate([part.previous for part in parts]) if len(parts) > 1 else parts[0].previous
        return self._layer.forward(
            np.array(tokens, np.int32),
            np.ascontiguousarray(previous),
            self._model.attention_batch(batch),
            self._kv_cache,
            self._moe.executor,
        )

    def _pick(self, hidden: F32) -> tuple[list[int], list[float]]:
        """The likeliest token of each row, and its probability."""
        logits = np.empty((len(hidden), self._model.config.vocab_size), np.float32)
        self._layer.head.forward(hidden, logits)
        pool = self._model.pool
        greedy = np.array([_GREEDY] * len(hidden), np.float64)
        picked: list[int] = ops.pick_tokens(pool, logits, greedy, [None] * len(hidden)).tolist()
        found = ops.log_probabilities(pool, logits, range(len(hidden)), picked, [0] * len(hidden))
        return picked, [float(np.exp(value)) for (_, value), *_ in found]
