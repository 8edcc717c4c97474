"""The depth to which a drafter with a model of its own drafts: chosen before its time is spent.

After drafting, `Speculator` chooses how many of the drafted tokens a step verifies.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from twofold.api.speculative_config import SpeculativeConfig
from twofold.step.draft_price import LEAST_GAIN, Probes, StepTimes
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.drafts import Draft, DraftState
from twofold.step.sequences import Sequence

_UNTRIED: Final = 0.7
"""Acceptance that is expected of a model's drafts before there was any."""
_UNTRIED_WEIGHT: Final = 2.0
"""Drafts that it counts for; for later tokens of a draft, drafts that the acceptance of the token before counts for."""
_DEEPER_AFTER: Final = 32
"""Drafted steps of which one is a token deeper than seems best, because a token that is never tried teaches nothing."""
_KEPT: Final = 0.97
"""Factor on a draft's weight when the next one is counted."""


class ModelDrafting:
    """One engine's model drafter, and the price of its depth."""

    def __init__(self, drafter: ModelDrafter, config: SpeculativeConfig, times: StepTimes) -> None:
        self.drafter = drafter
        self.is_probe = False
        """Whether the newest drafts are verified whatever their price."""
        self.spent_s = 0.0
        """Time of the newest drafts, on the run's clock."""
        self._config, self._times = config, times
        self._probes = Probes(config.num_speculative_tokens)
        self._num_drafted = 0
        # By position: sum of chances, number of drafts; older ones weigh less.
        self._expected = [[0.0, 0.0] for _ in range(config.num_speculative_tokens)]

    def expect(self, chances: Seq[float]) -> None:
        """Update the acceptance estimate from a new draft, verified or not. chances: after
        correction by measured acceptance."""
        for expected, chance in zip(self._expected, chances, strict=False):
            expected[0] = _KEPT * expected[0] + chance
            expected[1] = _KEPT * expected[1] + 1.0

    def draft(self, wanted: Seq[tuple[Sequence, DraftState, int]], num_sequences: int) -> list[Draft]:
        """Drafts for (sequence, state, most tokens); none if drafting is not worth its time in this step.

        num_sequences: decoding sequences in the step.
        """
        self.spent_s = 0.0
        depth = self._depth(wanted, num_sequences)
        if depth == 0:
            return []
        before = self.drafter.spent_s
        depths = [min(depth, most) for _, _, most in wanted]
        drafts = self.drafter.propose_all([sequence for sequence, _, _ in wanted], depths)
        self.spent_s = self.drafter.spent_s - before
        if self.is_probe and any(draft.tokens for draft in drafts):
            self._probes.begin()
        return drafts

    def judge_probe(self, depth: int, num_accepted: int) -> None:
        """See `Probes`."""
        self._probes.judge(depth, num_accepted)

    def _depth(self, wanted: Seq[tuple[Sequence, DraftState, int]], num_sequences: int) -> int:
        most = self._config.num_speculative_tokens
        self.is_probe = False
        if not self._config.adaptive:
            return most
        times, plain_s = self._times.table(num_sequences), self._times.plain_s(num_sequences)
        if times is None or not plain_s:  # they must be measured
            return 0
        pass_s = self.drafter.pass_s(len(wanted))
        if pass_s == 0.0:
            return 1
        drafted = [
            times[min(depth * len(wanted), len(times) - 1)] + depth * pass_s / plain_s
            for depth in range(most + 1)
        ]
        chances = self._chances()
        depth = _best_depth(chances, drafted, len(wanted), num_sequences)
        if depth == 0:
            self._probes.passed()
            # A probe whose text is not computed yet is continued in the next step.
            self.is_probe = self._probes.is_due(chances, drafted)
            return self._probes.depth if self.is_probe else 0
        self._num_drafted += 1
        return min(depth + (self._num_drafted % _DEEPER_AFTER == 0), most)

    def _chances(self) -> list[float]:
        """Expected acceptance by position, given that of the tokens before."""
        found, chance = [], _UNTRIED
        for total, weight in self._expected:
            chance = (total + _UNTRIED_WEIGHT * chance) / (weight + _UNTRIED_WEIGHT)
            found.append(chance)
        return found


def _best_depth(chances: Seq[float], times: Seq[float], num_drafts: int, num_sequences: int) -> int:
    """The depth with the most expected tokens per time of drafting and verifying.

    num_drafts: sequences that are drafted. times: of steps with that depth, as multiples of one without drafts.
    """
    best, best_rate = 0, LEAST_GAIN * num_sequences
    expected, together = float(num_sequences), 1.0
    for depth, chance in enumerate(chances, 1):
        together *= chance
        expected += num_drafts * together
        rate = expected / times[depth]
        if rate > best_rate:
            best, best_rate = depth, rate
    return best
