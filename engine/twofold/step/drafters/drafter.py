"""The interface of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from twofold.step.drafts import Draft
from twofold.step.sequences import Sequence


class Drafter(ABC):
    """Proposes tokens. One per engine, owned by its thread."""

    @abstractmethod
    def propose(self, sequence: Sequence, depth: int) -> Draft:
        """At most `depth` tokens that may follow the sequence's newest one; `NOTHING` without a guess.

        What it keeps of a sequence is in `sequence.drafting.memory`, which the sequence's end frees.
        """

    def release(self, sequence: Sequence) -> None:  # noqa: B027
        """The sequence has ended: free what it holds outside of its memory."""


class ModelDrafter(ABC):
    """Proposes tokens with a model of its own, for several sequences at once. Owned by the engine's thread.

    Its time depends on the depth, so the depth is chosen before it is asked.
    """

    spent_s: float = 0.0
    """Time spent drafting since the start, on the run's clock."""

    @property
    def unclocked_s(self) -> float:
        """The part of `spent_s` that an emulated accelerator's clock does not count."""
        return self.spent_s

    @abstractmethod
    def pass_s(self, num_sequences: int) -> float:
        """Expected time of drafting one token for each of so many sequences, on the run's clock; 0: unknown."""

    @abstractmethod
    def propose_all(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        """Drafts of at most these depths; `NOTHING` for a sequence whose text is not computed yet, of which the call
        computes a part."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """The sequence has ended: free its pages."""

    def ending(self, sequence: Sequence) -> None:  # noqa: B027
        """The sequence ends; it still has its pages, which others may use from now on."""
