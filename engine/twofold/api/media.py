"""Pictures of a prompt as the engine computes them: rows in place of tokens' embeddings, and their rotary positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class MediaRows:
    """What an encoder made of one picture."""

    rows: F32
    """[n, hidden], in place of the embeddings of n tokens."""
    digest: bytes
    """Digest of the picture, the encoder and its settings: equal rows at equal positions."""
    num_pixels: int = 0
    """Pixels of the picture as sent."""
    thumbnail: str = ""
    """A small view of it, a JPEG file in base64."""
    deep: F32 | None = None
    """[layers, n, hidden], added to the hidden states after each of the first layers (DeepStack); None: nothing is."""


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """Consecutive tokens of a prompt that stand for rows of one picture."""

    begin: int
    """Position of the first token in the prompt."""
    count: int
    media: MediaRows
    first_row: int = 0
    """The row of the first token. Families put text between the rows of a picture."""

    @property
    def end(self) -> int:
        return self.begin + self.count


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """Pictures of a prompt."""

    spans: tuple[MediaSpan, ...]
    """Ascending by position, apart from one another."""
    rotations: I32 | None = None
    """[axes, prompt tokens] position of each token in rotary embedding, by axis; None: its position in the prompt."""
    routed: tuple[tuple[int, int], ...] = ()
    """(begin, end) of tokens with experts of pictures, where the family has such; ascending, apart from one another."""

    @property
    def pictures(self) -> list[MediaRows]:
        """The pictures in the prompt's order; one that is shown twice is there twice."""
        return [span.media for span in self.spans if span.first_row == 0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt that stand for rows of pictures."""
        return sum(span.count for span in self.spans)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(begin, end) of all tokens that stand for rows without a token of text between them."""
        begins = [span.begin for span in self.spans]
        ends = [span.end for span in self.spans]
        cuts = [n for n in range(1, len(begins)) if begins[n] > ends[n - 1]]
        return tuple((begins[a], ends[b - 1]) for a, b in pairwise([0, *cuts, len(begins)]) if a < b)

    @cached_property
    def shift(self) -> int:
        """The first answer token's position in rotary embedding minus its position in the sequence."""
        if self.rotations is None:
            return 0
        return int(self.rotations.max(initial=-1)) + 1 - int(self.rotations.shape[1])

    def rotations_of(self, begin: int, end: int) -> I32:
        """Positions in rotary embedding [axes, end - begin] of the sequence's tokens from `begin` on, by axis, where
        there are `rotations`; those of an answer are equal on all axes."""
        assert self.rotations is not None
        known = self.rotations[:, begin:end]
        further = np.arange(max(begin, self.rotations.shape[1]), end, dtype=np.int32) + np.int32(self.shift)
        return np.concatenate([known, np.broadcast_to(further, (len(known), len(further)))], axis=1)

    def digest(self, begin: int, end: int) -> bytes:
        """Digest of what pictures are at the tokens from `begin` up to before `end`; empty where there are none."""
        parts = [
            b"%b %d %d %d"
            % (span.media.digest, span.begin - begin, min(span.end, end) - begin, span.first_row)
            for span in self.spans
            if span.begin < end and begin < span.end
        ]
        parts += [
            b"routed %d %d" % (max(first - begin, 0), min(last, end) - begin)
            for first, last in self.routed
            if first < end and begin < last
        ]
        return blake2b(b"\0".join(parts), digest_size=32).digest() if parts else b""


@dataclass(frozen=True, eq=False)
class MediaPart:
    """Rows of one picture in a step's flattened batch."""

    first: int
    """The first token's row in the batch."""
    rows: F32
    """[n, hidden]"""
    deep: F32 | None
    """[layers, n, hidden]"""

    @property
    def where(self) -> slice:
        return slice(self.first, self.first + len(self.rows))

    @property
    def num_deep(self) -> int:
        """Layers after which rows are added."""
        return 0 if self.deep is None else len(self.deep)


def deep_rows(parts: Iterable[MediaPart], layer: int) -> Iterator[tuple[slice, F32]]:
    """(rows of the batch, what is added to their hidden states after a layer)."""
    for part in parts:
        if part.deep is not None and 0 <= layer < part.num_deep:
            yield part.where, part.deep[layer]


def media_parts(media: PromptMedia, begin: int, end: int, first: int) -> list[MediaPart]:
    """The pictures' rows at a sequence's tokens from `begin` up to before `end`, in the batch from `first` on."""
    parts = []
    for span in media.spans:
        low, high = max(begin, span.begin), min(end, span.end)
        if low < high:
            rows = slice(low - span.begin + span.first_row, high - span.begin + span.first_row)
            deep = None if span.media.deep is None else span.media.deep[:, rows]
            parts.append(MediaPart(first + low - begin, span.media.rows[rows], deep))
    return parts
