"""The price of drafting with a model: how deep to draft, before it is known what the draft will be.

The expected tokens of a depth are those of `draft_price`, with the chances that earlier drafts had at each position.
The time of a depth is that of the step that verifies it, and the measured time of one drafting pass per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from twofold.step.draft_price import LEAST_GAIN, typical

_KEPT: Final = 0.9
"""What a chance keeps of its weight when the next draft's is counted."""
_FIRST_CHANCE: Final = 0.7
"""Chance of a position that has not been drafted."""


class DraftingPrice:
    """Chooses the depth of a step's drafts. Times are multiples of seconds on the run's clock."""

    def __init__(self, depth: int) -> None:
        """depth: most drafted tokens per sequence."""
        self._chances = [_FIRST_CHANCE] * depth
        self._passes: dict[int, deque[float]] = {}
        """Newest times per pass, by number of sequences."""

    def depth(
        self, num_sequences: int, num_drafted: int, verify_s: Callable[[int], float | None], most: int
    ) -> int:
        """The depth that yields the most expected tokens per time, at most `most`; 0: none is worth it.

        Args:
            num_sequences: decoding sequences in the step.
            num_drafted: how many of them would be drafted.
            verify_s: time of a step with so many drafted tokens; None: unknown.
        """
        plain_s, pass_s = verify_s(0), self.pass_s(num_drafted)
        if not plain_s:
            return 0
        best, best_rate = 0, LEAST_GAIN * num_sequences / plain_s
        expected, chance = float(num_sequences), 1.0
        for depth in range(1, min(most, len(self._chances)) + 1):
            chance *= self._chances[depth - 1]
            expected += num_drafted * chance
            step_s = verify_s(num_drafted * depth)
            if step_s is None:
                break
            rate = expected / (step_s + depth * pass_s)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def pass_s(self, num_drafted: int) -> float:
        """Time of a drafting pass; 0: none has been measured, so that the first one is."""
        if not self._passes:
            return 0.0
        nearest = min(self._passes, key=lambda number: abs(number - num_drafted))
        return typical(self._passes[nearest])

    def observe_time(self, num_drafted: int, num_passes: int, took_s: float) -> None:
        """Record the time of the passes of one step."""
        self._passes.setdefault(num_drafted, deque(maxlen=9)).append(took_s / num_passes)

    def observe_draft(self, chances: Seq[float]) -> None:
        """Record a draft's chances, verified or not, as measured acceptance corrects them."""
        for position, chance in enumerate(chances[: len(self._chances)]):
            known = self._chances[position]
            self._chances[position] = known + (1.0 - _KEPT) * (chance - known)
