"""Encoded pictures, and the places of their rows in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from twofold.api.media import MediaRows, MediaSpan, PromptMedia

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SentPicture:
    """A picture as a request sends it."""

    data: bytes
    where: str
    """The field that holds it, for errors."""
    low_detail: bool = False

    @cached_property
    def key(self) -> bytes:
        """Digest of the file and of how it is to be seen."""
        return blake2b(self.data, digest_size=32, key=b"low" if self.low_detail else b"").digest()


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
class PictureTokens:
    """Tokens of a model's pictures."""

    rows: tuple[int, ...]
    """Tokens of which each stands for a row."""
    routed: tuple[int, ...]
    """Tokens with experts of pictures: those and marks around them; empty: the family has no such experts."""


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt with a token for every row of its pictures."""

    token_ids: tuple[int, ...]
    media: PromptMedia
    offsets: I64
    """Position in `token_ids` of each token of the prompt that was given, and of its end."""


Rotations = Callable[[I64, Sequence[tuple[int, ...] | None]], I32]
"""Rotary positions [axes, tokens] of a prompt with a token for every row, from the grids of its pictures."""


def place_pictures(
    token_ids: Sequence[int],
    pictures: Sequence[EncodedPicture],
    tokens: PictureTokens,
    rotations: Rotations | None,
) -> PlacedPrompt:
    """Repeat the token of each run of rows, in a prompt in which `EncodedPicture.text` stands for each picture, in
    order.

    rotations: None where the positions are those of text.

    Raises:
        ValueError: the prompt has more or fewer runs than the pictures.
    """
    ids = np.asarray(token_ids, np.int64)
    places = np.flatnonzero(np.isin(ids, tokens.rows))
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
    whole = np.repeat(ids, counts)
    edges = np.flatnonzero(np.diff(np.isin(whole, tokens.routed), prepend=False, append=False)).tolist()
    media = PromptMedia(
        spans,
        None if rotations is None else rotations(whole, [picture.grid for picture in pictures]),
        tuple(zip(edges[::2], edges[1::2], strict=True)),
    )
    return PlacedPrompt(tuple(whole.tolist()), media, offsets)
