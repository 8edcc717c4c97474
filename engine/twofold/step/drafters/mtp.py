"""The model's own prediction layer (multi-token prediction), chained for more than one token."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from twofold.step.drafters.drafter import BatchDrafter
from twofold.step.drafts import NOTHING, Draft
from twofold.step.predictions import Predictions
from twofold.step.sequences import Sequence


class MtpDrafter(BatchDrafter):
    """See `BatchDrafter`."""

    def __init__(self, predictions: Predictions) -> None:
        self._predictions = predictions
        self._drafts: dict[int, Draft] = {}
        """By sequence, those of this step."""

    def prepare(self, sequences: Seq[Sequence], depth: int) -> None:
        drafts = self._predictions.draft(sequences, depth)
        self._drafts = {sequence.number: draft for sequence, draft in zip(sequences, drafts, strict=True)}

    @property
    def num_caught_up(self) -> int:
        return self._predictions.num_rows

    def settle(self, sequence: Sequence) -> None:
        self._predictions.settle(sequence)

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        return self._drafts.pop(sequence.number, NOTHING)
