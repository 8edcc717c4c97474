"""The interface of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Protocol

from twofold.step.drafts import Draft
from twofold.step.sequences import Sequence


class Drafter(Protocol):
    """Proposes tokens. One per engine, owned by its thread."""

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        """At most `depth` tokens that may follow the sequence's newest one; `NOTHING` without a guess.

        What it keeps of a sequence is in `sequence.drafting.memory`, which the sequence's end frees.
        """


class BatchDrafter(ABC):
    """A `Drafter` that computes the drafts of a step's sequences together, with a model. That takes time on the run's
    clock, so a price decides beforehand how deep it drafts (`step.drafting_price`)."""

    @abstractmethod
    def prepare(self, sequences: Seq[Sequence], depth: int) -> None:
        """Compute drafts of `depth` tokens, one pass per token; `propose` returns them in the same step. Sequences have
        pages for their tokens and `depth` - 2 more.

        Raises KernelError if the native code failed.
        """

    @property
    @abstractmethod
    def num_caught_up(self) -> int:
        """Positions computed in the newest `prepare` beside one per drafted token, of all sequences."""

    @abstractmethod
    def settle(self, sequence: Sequence) -> None:
        """A sequence ends; others may use its pages from now on."""

    @abstractmethod
    def propose(self, sequence: Sequence, depth: int) -> Draft:
        """See `Drafter`."""
