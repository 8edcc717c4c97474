"""Builds the flattened batch of a step from the schedule.

While the same sequences decode, one token each, only the changed values are written into the previous step's arrays. A
step of a small model takes a millisecond, and rebuilding the arrays costs it a tenth.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.api.media import MediaPart, PromptMedia, media_parts
from twofold.blocks.ngram_hash import ngram_ids
from twofold.step.model import BatchMeta
from twofold.step.sequences import Schedule, ScheduledSequence

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
_AXES: Final = 3
"""Time, row and column."""


class StepBatch:
    """Reusable batch, one per runner. `of` returns the step's batch; its arrays are valid until the next call."""

    def __init__(self, num_ids: int = 0) -> None:
        """num_ids: see `LoadedModel.num_ids`."""
        self._num_ids = num_ids
        self.token_ids: I32 = np.empty(0, np.int32)
        """[T]"""
        self.requests: list[int] = []
        """[T] number of each token's sequence."""
        self.positions: list[int] = []
        """[T]"""
        self.generated: list[bool] = []
        """[T] whether the token belongs to an answer rather than a prompt."""
        self.last_rows: list[int] = []
        """Rows to sample from; of a sequence with drafts, its last `1 + drafts` rows."""
        self.first_rows: list[int] | None = None
        """Indices in `last_rows` of each sequence's first row to sample from; None: all, nothing is drafted."""
        self.verified: list[bool] = []
        """[T] whether the token is a sequence's newest or one of its drafts, both to be verified; empty: none is."""
        self.adapters: list[int] = []
        """[T] number of each token's adapter, -1 for none; empty: no token has any."""
        self.media: list[MediaPart] = []
        """Pictures' rows among the tokens."""
        self.pictures: list[bool] = []
        """[T] whether the token has experts of pictures; empty: no token has."""
        self.continues_decode = False
        """Whether the previous step had the same sequences, one token each; all rows are sampled from then."""
        self.meta = BatchMeta(self.token_ids, self.token_ids, np.empty((0, 0), np.int32), self.token_ids)
        self._version: int | None = None
        """Schedule that its arrays can be advanced by; None: the next step has others."""
        self._num_pages: list[int] = []

    def of(self, schedule: Schedule) -> StepBatch:
        """Return itself, filled with this step."""
        self.continues_decode = schedule.version == self._version
        if self.continues_decode:
            self._advance(schedule.items)
        else:
            decodes = self._fill(schedule.items)
            self._version = schedule.version if decodes else None
        return self

    def _fill(self, scheduled: Seq[ScheduledSequence]) -> bool:
        """Returns whether every sequence has one token and samples."""
        tokens: list[int] = []
        positions: list[int] = []
        sequence_index: list[int] = []
        requests: list[int] = []
        generated: list[bool] = []
        last_rows: list[int] = []
        first_rows: list[int] = []
        for index, (sequence, num_tokens, samples, drafts, _) in enumerate(scheduled):
            begin = sequence.num_computed
            end = begin + num_tokens
            tokens += sequence.token_ids[begin:end]
            tokens += drafts
            positions += range(begin, end)
            sequence_index += [index] * num_tokens
            requests += [sequence.number] * num_tokens
            generated += (position >= sequence.num_prompt_tokens for position in range(begin, end))
            if samples:
                first_rows.append(len(last_rows))
                last_rows += range(len(tokens) - 1 - len(drafts), len(tokens))
        self.token_ids = np.array(tokens, np.int32)
        self.requests, self.positions, self.last_rows = requests, positions, last_rows
        self.generated = generated
        self.adapters = adapters_of(scheduled)
        has_drafts = len(first_rows) < len(last_rows)
        self.first_rows = first_rows if has_drafts else None
        self.verified = verified_rows(scheduled) if has_drafts else []
        self.meta = BatchMeta(
            positions=np.array(positions, np.int32),
            sequence_index=np.array(sequence_index, np.int32),
            page_tables=page_tables([item.sequence.pages for item in scheduled]),
            prompt_lengths=np.array([item.sequence.num_prompt_tokens for item in scheduled], np.int32),
            records=np.array([item.sequence.record or 0 for item in scheduled], np.int32),
            kept_records=_kept_records(scheduled) if has_drafts else None,
            rotations=rotations_of(scheduled),
            block_rotations=partial(rotations_of, scheduled),
            ends=ends_of(scheduled),
            ids=ids_of(scheduled, self._num_ids),
        )
        self.media = media_of(scheduled)
        self.pictures = pictures_of(scheduled)
        self._num_pages = [len(item.sequence.pages) for item in scheduled]
        return len(tokens) == len(scheduled) == len(last_rows)

    def _advance(self, scheduled: Seq[ScheduledSequence]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        num_pages: list[int] = []
        for sequence, *_ in scheduled:
            tokens.append(sequence.token_ids[-1])
            positions.append(sequence.num_computed)
            num_pages.append(len(sequence.pages))
        self.token_ids[:] = tokens
        self.positions = positions
        self.generated = [True] * len(positions)
        self.media, self.pictures = [], []
        meta = self.meta
        meta.positions[:] = positions
        tables = meta.page_tables
        if num_pages != self._num_pages:
            self._num_pages, tables = num_pages, page_tables([item.sequence.pages for item in scheduled])
        self.meta = BatchMeta(
            meta.positions,
            meta.sequence_index,
            page_tables=tables,
            prompt_lengths=meta.prompt_lengths,
            last_position=max(positions),
            records=meta.records,
            rotations=None if meta.rotations is None else rotations_of(scheduled),
            block_rotations=partial(rotations_of, scheduled),
            ids=ids_of(scheduled, self._num_ids),
        )


def adapters_of(scheduled: Seq[ScheduledSequence]) -> list[int]:
    """[T] number of each token's adapter, -1 for none; empty: no token has any."""
    numbers = [(item.sequence.request.adapter, item.num_tokens) for item in scheduled]
    if not any(adapter for adapter, _ in numbers):
        return []
    return [-1 if adapter is None else adapter.number for adapter, count in numbers for _ in range(count)]


def media_of(scheduled: Seq[ScheduledSequence]) -> list[MediaPart]:
    """Pictures' rows among the step's tokens."""
    parts: list[MediaPart] = []
    first = 0
    for sequence, num_tokens, *_ in scheduled:
        media, begin = sequence.request.media, sequence.num_computed
        if media is not None:
            parts += media_parts(media, begin, begin + num_tokens, first)
        first += num_tokens
    return parts


def pictures_of(scheduled: Seq[ScheduledSequence]) -> list[bool]:
    """[T] whether the token has experts of pictures; empty: no token has."""
    found: list[bool] = []
    for sequence, num_tokens, *_ in scheduled:
        media, before = sequence.request.media, sequence.num_computed
        own = [False] * num_tokens
        for begin, end in () if media is None else media.routed:
            for at in range(max(begin - before, 0), min(end - before, num_tokens)):
                own[at] = True
        found += own
    return found if any(found) else []


def ids_of(scheduled: Seq[ScheduledSequence], num_ids: int) -> I64 | None:
    """[T, num_ids] ids of each token and of those before it in its sequence; None: no layer needs more than its own."""
    if num_ids < 2:
        return None
    known: list[int] = []
    rows: list[int] = []
    for sequence, num_tokens, _, drafts, _ in scheduled:
        begin = sequence.num_computed
        before = min(begin, num_ids - 1)
        known += [-1] * (num_ids - 1 - before)
        rows += range(len(known) + before, len(known) + before + num_tokens)
        known += sequence.token_ids[begin - before : begin + num_tokens - len(drafts)]
        known += drafts
    return np.array(known, np.int64)[np.array(rows)[:, None] - np.arange(num_ids)]


def next_ids_of(scheduled: Seq[ScheduledSequence], num_ids: int) -> I64:
    """Like `ids_of`, for as many tokens of prompts as the step computes, those after them: the next step's."""
    found = [np.empty((0, num_ids), np.int64)]
    for sequence, num_tokens, *_ in scheduled if num_ids else ():
        begin = sequence.num_computed + num_tokens
        if begin < sequence.num_prompt_tokens:
            first = max(0, begin + 1 - num_ids)
            found.append(ngram_ids(sequence.token_ids[first : begin + num_tokens], begin - first, num_ids))
    return np.concatenate(found)


def rotations_of(scheduled: Seq[ScheduledSequence], block: int = 1) -> I32 | None:
    """[axes, T] positions in rotary embedding; None: they are the tokens' positions.

    block: as `RopeConfig.block`.
    """
    turned = [_turned(item.sequence.request.media) for item in scheduled]
    if not any(turned):
        return None
    found = []
    for (sequence, num_tokens, *_), media in zip(scheduled, turned, strict=True):
        begin, end = sequence.num_computed, sequence.num_computed + num_tokens
        rows = np.arange(begin, end, dtype=np.int32) // block * block
        if media is not None:
            first = begin // block * block
            rows = media.rotations_of(first, end)[:, rows - first]
        found.append(np.broadcast_to(rows, (_AXES, num_tokens)))
    return np.concatenate(found, axis=1)


def ends_of(scheduled: Seq[ScheduledSequence]) -> I32 | None:
    """[T] see `BatchMeta.ends`."""
    seen = [item.sequence.bidirectional for item in scheduled]
    if not any(
        own and own[-1][1] > item.sequence.num_computed for own, item in zip(seen, scheduled, strict=True)
    ):
        return None
    found = []
    for (sequence, num_tokens, *_), own in zip(scheduled, seen, strict=True):
        before = sequence.num_computed
        ends = np.arange(before + 1, before + num_tokens + 1, dtype=np.int32)
        for begin, end in own:
            ends[max(begin - before, 0) : max(end - before, 0)] = end
        found.append(ends)
    return np.concatenate(found)


def _turned(media: PromptMedia | None) -> PromptMedia | None:
    """Pictures, if they have rotary positions of their own."""
    return None if media is None or media.rotations is None else media


def verified_rows(scheduled: Seq[ScheduledSequence]) -> list[bool]:
    """[T] whether the token is a sequence's newest or one of its drafts, both to be verified; empty: none is."""
    if not any(item.drafts for item in scheduled):
        return []
    return [bool(item.drafts) for item in scheduled for _ in range(item.num_tokens)]


def _kept_records(scheduled: Seq[ScheduledSequence]) -> I32 | None:
    """[T] record that receives the state after each token, -1 for none; None where no draft needs one."""
    if not any(item.records for item in scheduled):
        return None
    kept = [(*item.records[:-1], -1) if item.records else (-1,) * item.num_tokens for item in scheduled]
    return np.array([number for own in kept for number in own], np.int32)


def page_tables(pages: Seq[Seq[int]]) -> I32:
    """Block table [sequences, most pages]; unused entries are 0 and never read."""
    if len(pages) == 1:
        return np.array(pages, np.int32)
    tables = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, own in zip(tables, pages, strict=True):
        row[: len(own)] = own
    return tables
