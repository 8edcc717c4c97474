"""Encoded pictures, and the places of their rows in a prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from twofold.api.media import MediaRows, MediaSpan

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """A picture's rows, and what stands for them in a prompt."""

    text: str
    """Stands for the picture in place of the mark that the chat template writes, with one token for each of `runs`."""
    runs: tuple[int, ...]
    """Rows of each run of tokens."""
    media: MediaRows
    grid: tuple[int, ...] | None
    """Patches (time, height, width), from which rotary positions follow; None: the positions are those of text."""

    @property
    def num_bytes(self) -> int:
        deep = self.media.deep
        return self.media.rows.nbytes + (0 if deep is None else deep.nbytes)


@dataclass(frozen=True)
class PicturePlaces:
    """A prompt in which every row of its pictures has a token."""

    token_ids: I64
    spans: tuple[MediaSpan, ...]
    offsets: I64
    """Position here of each token of the prompt with one token per run, and of its end."""


def place_pictures(
    token_ids: Sequence[int], pictures: Sequence[EncodedPicture], row_tokens: Collection[int]
) -> PicturePlaces:
    """Repeat the token of each run of rows, in a prompt in which `EncodedPicture.text` stands for each picture, in
    order.

    Raises:
        ValueError: the prompt has more or fewer runs than the pictures.
    """
    ids = np.asarray(token_ids, np.int64)
    places = np.flatnonzero(np.isin(ids, list(row_tokens)))
    num_runs = sum(len(picture.runs) for picture in pictures)
    if len(places) != num_runs:
        raise ValueError(
            f"the prompt has {len(places)} tokens that stand for pictures; {num_runs} were expected for "
            f"{len(pictures)} pictures"
        )
    counts = np.ones(len(ids), np.int64)
    counts[places] = [run for picture in pictures for run in picture.runs]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    begins = iter(offsets[places].tolist())
    spans = tuple(
        MediaSpan(next(begins), run, picture.media, first_row)
        for picture in pictures
        for run, first_row in zip(picture.runs, accumulate(picture.runs, initial=0), strict=False)
    )
    return PicturePlaces(np.repeat(ids, counts), spans, offsets)
