"""A draft, and what a sequence keeps of its drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple


class Draft(NamedTuple):
    """Proposed tokens after a sequence's newest one."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    """Probability of each token, given that those before it are right, as the drafter estimates it. Measured
    acceptance corrects it (`step.draft_price`)."""


NOTHING: Final = Draft((), ())
_MOST_SKIPPED: Final = 7
_MOST_SKIPPED_IF_HOPELESS: Final = 127
_HOPELESS: Final = 0.2
"""Chance of a draft's first token below which no step is so cheap that the draft could pay."""


@dataclass(slots=True)
class DraftState:
    """One sequence's drafter, that drafter's memory of the sequence, and the acceptance of its drafts so far."""

    drafter: str
    memory: Any = None
    """Private to the drafter; None until its first proposal."""
    draft: Draft = NOTHING
    """The newest draft, as deep as it was proposed."""
    cells: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """See `Acceptance`."""
    num_skipped: int = 0
    """Steps from now on without a proposal."""
    num_passed: int = 0
    """Latest proposals in a row that were not worth a draft."""

    def passed(self, is_passed: bool, chance: float = 1.0) -> None:
        """Skip more steps the more proposals in a row were not worth a draft: to make one takes time, too.

        chance: of the first token of the proposal.
        """
        if not is_passed:
            self.num_passed = self.num_skipped = 0
            return
        most = _MOST_SKIPPED_IF_HOPELESS if chance < _HOPELESS else _MOST_SKIPPED
        self.num_skipped = min(2**self.num_passed - 1, most)
        self.num_passed = min(self.num_passed + 1, 7)
