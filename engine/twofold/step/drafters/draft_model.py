"""Draft model: a second, smaller model with the same vocabulary continues each text greedily.

It has KV pages of its own. Before it drafts for a sequence it computes the tokens that it has not seen: those accepted
since, and at first the whole prompt, whether or not the target found it in its prefix cache. A long prompt is computed
in chunks of about `_CATCH_UP_S`, one per step of the engine, and the sequence decodes without drafts meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from twofold.api.speculative_config import MAX_DEPTH
from twofold.blocks import ops
from twofold.experts.moe import MoeRuntime
from twofold.step.batch import page_tables
from twofold.step.drafters.draft_pages import DraftPagePool, DraftPages
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.drafters.likeliest import likeliest
from twofold.step.drafters.pass_times import PassTimes
from twofold.step.drafts import NOTHING, Draft
from twofold.step.model import BatchMeta, LoadedModel
from twofold.step.sequences import Sequence

F32 = npt.NDArray[np.float32]

_CATCH_UP_S: Final = 0.02
"""Time per step for computing texts that the draft model has not seen."""
_FEWEST_CAUGHT_UP: Final = 32
"""Tokens of such a text per step, however long they take."""
_LEAST_CHANCE: Final = 0.1
"""A draft ends where its tokens are right together with less than this chance, as the draft model sees it."""


class Chunk(NamedTuple):
    """Tokens of one sequence that a pass computes."""

    held: DraftPages
    begin: int
    """Position of the first."""
    tokens: Seq[int]
    prompt_length: int


class DraftModel:
    """A small model and its KV cache on the CPU; `PassFn` of `DraftModelDrafter`."""

    def __init__(self, model: LoadedModel, moe: MoeRuntime, cache: ops.StateCache, vocab_size: int) -> None:
        """vocab_size: the target's; tokens after it are never drafted."""
        self._model, self._moe, self._cache = model, moe, cache
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        self.max_context = model.config.max_context
        self.num_known_tokens = model.config.vocab_size

    def forward(self, chunks: Seq[Chunk]) -> F32:
        """Logits [chunks, vocabulary] after each chunk's last token. Writes keys and values to the chunks' pages."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        positions = [at for chunk in chunks for at in range(chunk.begin, chunk.begin + len(chunk.tokens))]
        index = np.repeat(np.arange(len(chunks), dtype=np.int32), lengths)
        batch = BatchMeta(
            positions=np.array(positions, np.int32),
            sequence_index=index,
            page_tables=page_tables([chunk.held.pages for chunk in chunks]),
            prompt_lengths=np.array([chunk.prompt_length for chunk in chunks], np.int32),
            last_position=max(positions),
            records=np.zeros(len(chunks), np.int32),
        )
        tokens = np.array([token for chunk in chunks for token in chunk.tokens], np.int32)
        self._moe.begin_step(0, index.tolist(), positions)
        hidden = self._model.forward(tokens, batch, self._cache, self._moe.executor)
        self._moe.executor.end_step()
        last = np.cumsum(lengths) - 1
        return self._model.logits(hidden[last])[:, : self._vocab_size]


@dataclass(slots=True)
class _Drafting:
    """A sequence's draft so far."""

    held: DraftPages
    depth: int
    length: int
    """Tokens of the sequence itself."""
    prompt_length: int
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    together: float = 1.0

    def add(self, token: int, chance: float) -> None:
        self.tokens.append(token)
        self.chances.append(chance)
        self.together *= chance

    def next_chunk(self) -> Chunk:
        at = self.length + len(self.tokens) - 1
        self.held.drafted.append(self.tokens[-1])
        return Chunk(self.held, at, self.tokens[-1:], self.prompt_length)


class DraftModelDrafter(ModelDrafter):
    """See `ModelDrafter`."""

    def __init__(
        self, model: DraftModel, pages: DraftPagePool, times: PassTimes, *, stops_early: bool = True
    ) -> None:
        """stops_early: end a draft whose tokens have become unlikely."""
        self._model, self.pages, self._times = model, pages, times
        self._stops_early = stops_early

    def pass_s(self, num_sequences: int) -> float:
        return self._times.pass_s(num_sequences)

    def release(self, sequence: Sequence) -> None:
        self.pages.release(sequence)

    def propose_all(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        found: dict[int, _Drafting] = {}
        chunks, ready, in_use = list[Chunk](), list[_Drafting | None](), list[DraftPages]()
        room = self._room()
        for number, (sequence, depth) in enumerate(zip(sequences, depths, strict=True)):
            chunk = self._unseen(sequence, depth, room, in_use)
            if chunk is None:
                continue
            in_use.append(chunk.held)
            room -= len(chunk.tokens) if len(chunk.tokens) > MAX_DEPTH + 1 else 0
            chunks.append(chunk)
            length = len(sequence.token_ids)
            is_ready = chunk.begin + len(chunk.tokens) == length
            ready.append(_Drafting(chunk.held, depth, length, chunk.prompt_length) if is_ready else None)
            if is_ready:
                found[number] = ready[-1]  # type: ignore[assignment]
        self._draft(chunks, ready)
        made = (found.get(number) for number in range(len(sequences)))
        return [NOTHING if each is None else Draft(tuple(each.tokens), tuple(each.chances)) for each in made]

    def _room(self) -> int:
        """Tokens of long texts that this call may compute."""
        token_s = self._times.token_s
        return max(int(_CATCH_UP_S / token_s), _FEWEST_CAUGHT_UP) if token_s else _FEWEST_CAUGHT_UP

    def _unseen(self, sequence: Sequence, depth: int, room: int, in_use: Seq[DraftPages]) -> Chunk | None:
        """The sequence's next tokens to compute, with pages for them and its draft; None: it cannot draft now."""
        token_ids = sequence.token_ids
        held = self.pages.of(sequence)
        held.settle(token_ids)
        num_unseen = len(token_ids) - held.num_known
        count = num_unseen if num_unseen <= MAX_DEPTH + 1 else min(num_unseen, room)
        begin, end = held.num_known, held.num_known + count
        if count < 1 or len(token_ids) + depth > self._model.max_context:
            return None
        tokens = token_ids[begin:end]
        if max(tokens) >= self._model.num_known_tokens:
            return None
        if not self.pages.grow(held, end + (depth - 1 if count == num_unseen else 0), in_use):
            return None
        return Chunk(held, begin, tokens, sequence.num_prompt_tokens)

    def _draft(self, chunks: Seq[Chunk], drafting: Seq[_Drafting | None]) -> None:
        """Compute the chunks and continue the drafts of those that end their text."""
        logits = self._timed(chunks) if chunks else None
        for chunk in chunks:
            chunk.held.num_known += len(chunk.tokens)
        while logits is not None:
            rows = [row for row, each in enumerate(drafting) if each is not None]
            if not rows:
                return
            tokens, chances = likeliest(logits[rows])
            active = []
            for row, token, chance in zip(rows, tokens, chances, strict=True):
                each = drafting[row]
                assert each is not None
                each.add(token, chance)
                if len(each.tokens) < each.depth and not (
                    self._stops_early and each.together < _LEAST_CHANCE
                ):
                    active.append(each)
            drafting = active
            logits = self._timed([each.next_chunk() for each in active]) if active else None

    def _timed(self, chunks: Seq[Chunk]) -> F32:
        """A pass. Learns its time."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        began = time.perf_counter()
        logits = self._model.forward(chunks)
        took_s = time.perf_counter() - began
        is_long = any(len(chunk.tokens) > MAX_DEPTH + 1 for chunk in chunks)
        self.spent_s += self._times.observe(len(chunks), num_tokens, took_s, is_long=is_long)
        return logits
