"""The model's own layer for multi-token prediction (MTP), chained for more than one token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from typing import Protocol

from twofold.step.draft_price import typical
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.drafts import NOTHING, Draft
from twofold.step.mtp_runner import MtpRunner
from twofold.step.sequences import Sequence


class Pages(Protocol):
    """The target's pages, which the layer shares."""

    def can_grow(self, sequence: Sequence, num_drafts: int = 0) -> bool: ...
    def grow(self, sequence: Sequence, num_drafts: int = 0) -> None: ...


class MtpDrafter(ModelDrafter):
    """See `ModelDrafter`."""

    def __init__(self, mtp_runner: MtpRunner, pages: Pages) -> None:
        self._mtp_runner, self._pages = mtp_runner, pages
        self._passes_s: dict[int, deque[float]] = {}
        """Newest times per pass, by number of sequences."""

    @property
    def unclocked_s(self) -> float:
        return 0.0  # its experts run where the model's do

    def pass_s(self, num_sequences: int) -> float:
        if not self._passes_s:
            return 0.0
        nearest = min(self._passes_s, key=lambda number: abs(number - num_sequences))
        return typical(self._passes_s[nearest])

    def propose_all(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        # The last token of a draft is not computed, and the sequence's newest one has a page.
        granted = [
            depth if self._has_pages(each, depth - 2) else 0
            for each, depth in zip(sequences, depths, strict=True)
        ]
        drafted = [number for number, depth in enumerate(granted) if depth > 0]
        if not drafted:
            return [NOTHING] * len(sequences)
        before, began = self._mtp_runner.num_rows, self._clock_s()
        drafts = self._mtp_runner.draft([sequences[at] for at in drafted], [granted[at] for at in drafted])
        took_s = self._clock_s() - began
        self.spent_s += took_s
        num_passes = max(granted)
        # A long text that was not drafted is computed in the first pass.
        if self._mtp_runner.num_rows - before <= (2 * num_passes + 1) * len(drafted):
            self._passes_s.setdefault(len(drafted), deque(maxlen=9)).append(took_s / num_passes)
        found = dict(zip(drafted, drafts, strict=True))
        return [found.get(number, NOTHING) for number in range(len(sequences))]

    def release(self, sequence: Sequence) -> None:
        """Nothing: its pages are the target's."""

    def ending(self, sequence: Sequence) -> None:
        self._mtp_runner.settle(sequence)

    def _has_pages(self, sequence: Sequence, num_more: int) -> bool:
        if num_more <= 0:
            return True
        if not self._pages.can_grow(sequence, num_more):
            return False
        self._pages.grow(sequence, num_more)
        return True

    def _clock_s(self) -> float:
        virtual_us = self._mtp_runner.virtual_now_us
        return time.perf_counter() if virtual_us is None else 1e-6 * virtual_us
