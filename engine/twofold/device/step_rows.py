"""Rows of a scheduled step on a device: of a table step one by one, of a step placed by the host as a flattened batch.

A sequence whose drafts are verified has a row of one token for its newest token and for each draft. Keys and values of
all rows are written before any row attends, so each row's length is its causal mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twofold.blocks.block_weights import F32
from twofold.blocks.device_step import DeviceBatch
from twofold.device.decode_inputs import DecodeRow
from twofold.step.batch import adapters_of, ends_of, media_of, pictures_of, rotations_of
from twofold.step.sequences import ScheduledSequence

RecordIndex = Callable[[int], int]
"""Where a record is on the device, by its number."""


class _Piece(NamedTuple):
    """Consecutive tokens of one sequence; one token where drafts are verified."""

    token_ids: Sequence[int]
    begin: int
    pages: Sequence[int]
    record: int
    chain: int = 0
    """Pieces directly before it that belong to the same sequence."""
    adapter: int = -1
    shift: int = 0
    """Rotary positions of an answer's tokens minus their positions."""

    @property
    def end(self) -> int:
        return self.begin + len(self.token_ids)


def decode_rows(
    scheduled: Sequence[ScheduledSequence], record_index: RecordIndex, inputs: F32 | None = None
) -> list[DecodeRow]:
    """Rows of a step in which every sequence decodes. inputs: as in `flattened`."""
    return [
        DecodeRow(
            piece.token_ids[0],
            piece.begin,
            piece.pages,
            piece.record,
            piece.chain,
            piece.adapter,
            shift=piece.shift,
            inputs=() if inputs is None else inputs[n],
        )
        for n, piece in enumerate(_pieces(scheduled, record_index))
    ]


def flattened(
    scheduled: Sequence[ScheduledSequence],
    page_size: int,
    device: torch.device,
    record_index: RecordIndex,
    *,
    inputs: F32 | None = None,
) -> tuple[DeviceBatch, list[int], list[int]]:
    """The step's rows concatenated, the rows to compute logits of, and which of these are a sequence's first.

    inputs: of the layers, [T, width], where the host computes them.
    """
    pieces = list(_pieces(scheduled, record_index))
    tables = torch.zeros((len(pieces), max(len(piece.pages) for piece in pieces)), dtype=torch.int32)
    tokens: list[int] = []
    places: list[int] = []
    for table, piece in zip(tables, pieces, strict=True):
        tokens += piece.token_ids
        places += [
            piece.pages[p // page_size] * page_size + p % page_size for p in range(piece.begin, piece.end)
        ]
        table[: len(piece.pages)] = torch.tensor(piece.pages, dtype=torch.int32)
    sampled_rows: list[int] = []
    first_rows: list[int] = []
    end = 0
    for item in scheduled:
        end += item.num_tokens
        if item.samples:
            first_rows.append(len(sampled_rows))
            sampled_rows += range(end - 1 - len(item.drafts), end)

    def narrow(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lengths = [piece.end for piece in pieces]
    rotations, ends, pictures = rotations_of(scheduled), ends_of(scheduled), pictures_of(scheduled)
    chain = [piece.chain for piece in pieces]
    batch = DeviceBatch(
        token_ids=torch.tensor(tokens, device=device),
        positions=torch.tensor([p for piece in pieces for p in range(piece.begin, piece.end)], device=device),
        slot_mapping=torch.tensor(places, device=device),
        page_tables=tables.to(device),
        seq_lens=narrow(lengths),
        query_lens=tuple(len(piece.token_ids) for piece in pieces),
        host_seq_lens=tuple(lengths),
        records=narrow([piece.record for piece in pieces]),
        chain=narrow(chain) if any(chain) else None,
        adapters=narrow(numbers) if (numbers := adapters_of(scheduled)) else None,
        rotations=None if rotations is None else torch.from_numpy(rotations).long().to(device),
        media=tuple(media_of(scheduled)),
        pictures=torch.tensor(pictures, device=device) if pictures else None,
        ends=None if ends is None else torch.from_numpy(ends).long().to(device),
        layer_inputs=None if inputs is None else torch.from_numpy(inputs).to(device),
    )
    return batch, sampled_rows, first_rows


def _pieces(scheduled: Sequence[ScheduledSequence], record_index: RecordIndex) -> Iterator[_Piece]:
    for item in scheduled:
        sequence, begin = item.sequence, item.sequence.num_computed
        record = record_index(sequence.record or 0)
        loaded = sequence.request.adapter
        adapter = -1 if loaded is None else loaded.number
        shift = 0 if sequence.request.media is None else sequence.request.media.shift
        if not item.drafts:
            end = begin + item.num_tokens
            tokens = sequence.token_ids[begin:end]
            yield _Piece(tokens, begin, sequence.pages, record, adapter=adapter, shift=shift)
            continue
        for at, token in enumerate((sequence.token_ids[begin], *item.drafts)):
            own = record_index(item.records[at]) if item.records else record
            yield _Piece((token,), begin + at, sequence.pages, own, at, adapter, shift)
