"""Which adapter each row of a step uses, and what adapters change at the ends of a model: embedding and head.

Between the ends the native operators compute adapters themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twofold.adapters.adapter import LowRank
from twofold.blocks import ops

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class AdapterEnds:
    """An adapter's own ends of the model; None: the model's."""

    table: F32 | None = None
    """Embedding [vocabulary, hidden]."""
    embedding: LowRank | None = None
    """What is added to rows of the embedding."""
    head: ops.LmHead | None = None


class AdapterSteps:
    """The adapters of a model's next rows."""

    def __init__(self) -> None:
        self.native = ops.AdapterRows()
        self.ends: dict[int, AdapterEnds] = {}
        """By number of the adapter; only those that have any."""
        self._numbers: Seq[int] = ()

    def set(self, numbers: Seq[int]) -> None:
        """Give each row of the next `forward` or `logits` an adapter, -1 for none; empty: no row has any."""
        self.native.set(numbers)
        self._numbers = numbers if self.ends else ()

    def change_embeddings(self, token_ids: I32, rows: F32) -> None:
        """Change embeddings [T, hidden] of the step's tokens in place."""
        for own, ends in self._own_ends():
            tokens = token_ids[own]
            if ends.table is not None:
                rows[own] = ends.table[tokens]
            if ends.embedding is not None:
                rows[own] += ends.embedding.b[tokens] @ ends.embedding.a

    def change_logits(self, hidden_rows: F32, logits: F32) -> None:
        """Replace the logits [R, vocabulary] of rows whose adapter has a head of its own, in place."""
        for own, ends in self._own_ends():
            if ends.head is not None:
                self.native.set([self._numbers[row] for row in own])
                theirs = np.empty((len(own), logits.shape[1]), np.float32)
                ends.head.forward(np.ascontiguousarray(hidden_rows[own]), theirs)
                logits[own] = theirs

    def _own_ends(self) -> Iterator[tuple[list[int], AdapterEnds]]:
        """(rows, ends) of each adapter among the rows that has ends of its own."""
        if not self._numbers:  # every step of an engine without adapters: 4 us of a small model's 600
            return
        for number in sorted(set(self._numbers) & self.ends.keys()):
            rows = [row for row, each in enumerate(self._numbers) if each == number]
            yield rows, self.ends[number]
