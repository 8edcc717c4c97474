"""The interface of a drafter."""

from __future__ import annotations

from typing import Protocol

from twofold.step.drafts import Draft
from twofold.step.sequences import Sequence


class Drafter(Protocol):
    """Proposes tokens. One per engine, owned by its thread."""

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        """At most `depth` tokens that may follow the sequence's newest one; `NOTHING` without a guess.

        What it keeps of a sequence is in `sequence.drafting.memory`, which the sequence's end frees.
        """
