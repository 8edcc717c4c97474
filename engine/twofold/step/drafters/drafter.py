"""The interface of a drafter, and what a sequence keeps of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from twofold.step.sequences import Sequence


class Draft(NamedTuple):
    """Proposed tokens after a sequence's newest one."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    """Probability of each token, given that those before it are right, as the drafter estimates it. Measured
    acceptance corrects it (`step.draft_price`)."""


NOTHING: Final = Draft((), ())


class Drafter(Protocol):
    """Proposes tokens. One per engine, owned by its thread."""

    @property
    def name(self) -> str: ...

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        """At most `depth` tokens that may follow the sequence's newest one; `NOTHING` without a guess.

        What it keeps of a sequence is in `sequence.drafting.memory`, which the sequence's end frees.
        """


@dataclass(slots=True)
class DraftState:
    """One sequence's drafter, the drafter's memory of the sequence, and the acceptance of its drafts so far."""

    drafter: Drafter
    memory: Any = None
    """Of the drafter alone; None at first."""
    draft: Draft = NOTHING
    """The newest draft, as deep as it was proposed."""
    cells: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """See `Acceptance`."""
