"""The price of a draft's depth: expected accepted tokens per second of the step.

A step that verifies m tokens reads the union of their experts, so its time grows with m. The cost model predicts by how
much, under the present share of resident experts; measured steps correct it. All times of the measured steps are kept
as multiples of the newest time of a step without drafts, because other load on a machine changes both alike.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final, Protocol

import numpy as np

from twofold.experts.moe import MoeRuntime

_BINS: Final = 5
_POSITIONS: Final = 4
"""Positions in a draft with an acceptance of their own; later ones share the last."""
_STATED_WEIGHT: Final = 2.0
"""Trials that a drafter's own estimate counts for."""
_ALL_WEIGHT: Final = 4.0
"""Trials that the acceptance of all requests counts for in one request's."""
_KEPT: Final = 0.998
"""Factor on a trial's weight when the next one is counted."""
LEAST_GAIN: Final = 1.02
"""How much better than no draft a draft must be, because times and chances are estimates."""
_REFRESH_AFTER: Final = 64
"""Steps after which residency and times without drafts are read again."""
_PLAIN_AFTER: Final = 64
"""Measured steps after which one without drafts is measured again."""
_LEAST_ADDED: Final = 0.01
"""Time that each drafted token adds beside the experts', as a share of a plain step's, before any was measured."""
_NOISE: Final = 0.3
"""How much a step's time varies, as a share of it."""
_SHARE_SPREAD: Final = 0.5
"""How far the experts' measured time may be from the model's, as a share of it."""
_ADDED_SPREAD: Final = 0.1
"""How far a drafted token's added time may be from `_LEAST_ADDED`."""
_KEPT_STEP: Final = 0.995
"""Factor on a measured step's weight when the next one is measured."""
_SETTLED: Final = 32
"""Measured steps after which times are not refitted after each step, but after `_TABLE_AFTER`."""
_TABLE_AFTER: Final = 8
_OUTLIER: Final = 2.0
"""A step counts at most as this multiple of its expected time."""
_PROBE_SHARE: Final = 0.005
"""Share of the time that probes may lose."""
_LEAST_PROBE_LOSS: Final = 0.02
"""Loss at which every fourth step is a probe."""
_MOST_DRAFTS: Final = 64
"""Most drafted tokens per step, of all sequences, where depths are chosen by price."""

Cells = dict[tuple[int, int], list[float]]
"""(accepted, tried) by position and by the drafter's own estimate, in `_BINS` bins."""


class Acceptance:
    """Estimates the probability that a drafted token is accepted, given that those before it in the draft are.

    By drafter, position, and the drafter's own estimate. That is first taken to be as far too high as the one of the
    token before. A request's own trials count as far as they differ from those of all requests by more than chance (a
    positive-part James-Stein estimate).
    """

    def __init__(self) -> None:
        self._of_drafter: dict[str, Cells] = {}

    def chances(self, drafter: str, own: Cells, stated: Seq[float]) -> list[float]:
        """Probability of each token of a draft. own: the request's trials."""
        every = self._of_drafter.setdefault(drafter, {})
        found = []
        trust = 1.0
        for position, stated_chance in enumerate(stated):
            cell = _cell(position, stated_chance)
            accepted, tried = every.get(cell, _NONE)
            chance = trust * stated_chance
            chance = (accepted + _STATED_WEIGHT * chance) / (tried + _STATED_WEIGHT)
            accepted, tried = own.get(cell, _NONE)
            separate = (accepted + _ALL_WEIGHT * chance) / (tried + _ALL_WEIGHT) - chance
            by_chance = 4.0 * (
                chance * (1.0 - chance) + _LEAST_VARIANCE
            )  # twice the standard deviation, squared
            if tried * separate * separate > by_chance:
                chance += (1.0 - by_chance / (tried * separate * separate)) * separate
            found.append(chance)
            trust = min(1.0, chance / stated_chance) if stated_chance > 0 else 1.0
        return found

    def observe(self, drafter: str, own: Cells, stated: Seq[float], num_accepted: int) -> None:
        """Count a verified draft. Tokens after the first rejected one say nothing."""
        for cells in (self._of_drafter.setdefault(drafter, {}), own):
            for position, chance in enumerate(stated[: num_accepted + 1]):
                trial = cells.setdefault(_cell(position, chance), [0.0, 0.0])
                trial[0] = _KEPT * trial[0] + (position < num_accepted)
                trial[1] = _KEPT * trial[1] + 1.0


_LEAST_VARIANCE: Final = 0.01
"""Added to the variance of a trial, because the chances of all requests are estimates, too."""
_NONE: Final = (0.0, 0.0)


def _cell(position: int, chance: float) -> tuple[int, int]:
    return min(position, _POSITIONS - 1), min(int(chance * _BINS), _BINS - 1)


class ExpertTimes(Protocol):
    """Predicted time of all MoE layers of a step."""

    def refresh(self) -> None:
        """Take the present residency into account."""

    def step_s(self, num_tokens: int) -> float: ...
    def begin(self) -> None:
        """A step with drafts begins."""

    def observe(self, num_tokens: int) -> None:
        """That step has ended; it had this many tokens, all of them decoded."""


class MoeTimes:
    """`ExpertTimes` of a runtime's cost model, for the union of experts that the tokens' routers choose.

    The number of distinct experts of m tokens is E (1 - (1 - k/E)^m) if routing is independent. A text's neighbouring
    tokens share experts, so it is less; the measured ratio is applied.
    """

    def __init__(self, moe: MoeRuntime, num_layers: int | None = None) -> None:
        """num_layers: MoE layers of a step; None: all."""
        self._moe = moe
        self._num_layers = moe.shape.num_layers if num_layers is None else num_layers
        self._overlap = 1.0
        self._num_runs = 0
        self._hits = self._routed = 0
        self._resident = 0.0
        self._known: dict[int, float] = {}

    def refresh(self) -> None:
        self._known.clear()
        counts = self._moe.counts()
        routed = counts.hits + counts.cpu_misses + counts.fetched
        if routed > self._routed:
            self._resident = (counts.hits - self._hits) / (routed - self._routed)
        self._hits, self._routed = counts.hits, routed

    def begin(self) -> None:
        self._num_runs = self._moe.num_expert_runs

    def observe(self, num_tokens: int) -> None:
        measured = (self._moe.num_expert_runs - self._num_runs) / max(self._num_layers, 1)
        self._overlap += 0.1 * (measured / self._independent(num_tokens) - self._overlap)

    def step_s(self, num_tokens: int) -> float:
        if num_tokens not in self._known:
            self._known[num_tokens] = self._step_s(num_tokens)
        return self._known[num_tokens]

    def _step_s(self, num_tokens: int) -> float:
        if self._num_layers == 0:
            return 0.0
        union = max(self._independent(num_tokens) * self._overlap, self._moe.shape.top_k)
        # Whole experts would make steps of a plan's time, where the mean of many layers has none.
        low, part = int(union), union - int(union)
        layer_us = (1.0 - part) * self._layer_us(num_tokens, low)
        if part > 0:
            layer_us += part * self._layer_us(num_tokens, low + 1)
        return 1e-6 * self._num_layers * layer_us

    def _layer_us(self, num_tokens: int, union: int) -> float:
        """Mean time of a layer whose tokens use so many distinct experts."""
        share, rest = divmod(num_tokens * self._moe.shape.top_k, union)
        loads = [share + 1] * rest + [max(share, 1)] * (union - rest)
        # Heavily used experts are resident first.
        hits = self._resident * union
        low, part = int(hits), hits - int(hits)
        layer_us = (1.0 - part) * self._moe.cost.layer_us(loads[:low], loads[low:])
        if part > 0:
            layer_us += part * self._moe.cost.layer_us(loads[: low + 1], loads[low + 1 :])
        return layer_us

    def _independent(self, num_tokens: int) -> float:
        experts, top_k = self._moe.shape.num_experts, self._moe.shape.top_k
        return experts * (1.0 - (1.0 - top_k / experts) ** num_tokens)


def typical(times: Iterable[float]) -> float:
    """Mean of the lower three quarters. Other load on the machine only ever adds time, and experts vary both ways."""
    ordered = sorted(times)
    kept = ordered[: max(1, len(ordered) * 3 // 4)]
    return sum(kept) / len(kept)


class StepTimes:
    """Times of decode steps by their number of sequences and drafts, as multiples of a step without drafts."""

    def __init__(self, experts: ExpertTimes, depth: int) -> None:
        """depth: most drafted tokens per sequence."""
        self._experts = experts
        self._depth = depth
        self._fits: dict[int, _Fit] = {}
        """By number of sequences."""
        self._plain_at: dict[int, int] = {}
        """Newest step without drafts."""
        self._tables: dict[int, list[float]] = {}
        self._num_observed = 0
        self._refresh_at = 1

    def begin(self) -> None:
        """A step with drafts begins."""
        self._experts.begin()

    def observe(self, num_sequences: int, num_tokens: int, step_s: float) -> None:
        """Record a step without prompt tokens, of `num_tokens` tokens, drafts included."""
        self._num_observed += 1
        if self._num_observed == self._refresh_at:
            self._experts.refresh()
            self._tables.clear()
            self._refresh_at += min(self._refresh_at, _REFRESH_AFTER)
        num_drafts = num_tokens - num_sequences
        if num_drafts > 0:
            self._experts.observe(num_tokens)
        if step_s <= 0:
            return
        fit = self._fits.get(num_sequences)
        if num_drafts == 0:
            self._plain_at[num_sequences] = self._num_observed
            if fit is None:
                fit = self._fits[num_sequences] = _Fit(step_s, self._experts.step_s(num_sequences))
        if fit is not None:
            fit.add(num_drafts, self._experts.step_s(num_tokens), step_s)
            if fit.is_due:
                self._tables.pop(num_sequences, None)

    def table(self, num_sequences: int) -> list[float] | None:
        """Times of steps with 0, 1, … drafts as multiples of the first; None where a step without must be measured."""
        fit = self._fits.get(num_sequences)
        if fit is None or self._num_observed - self._plain_at[num_sequences] >= _PLAIN_AFTER:
            return None
        found = self._tables.get(num_sequences)
        if found is None:
            most = min(num_sequences * self._depth, _MOST_DRAFTS)
            times = fit.times([self._experts.step_s(num_sequences + drafts) for drafts in range(most + 1)])
            found = self._tables[num_sequences] = [time / times[0] for time in times]
        return found

    def estimated_s(self, num_sequences: int, num_drafts: int) -> float:
        """Time of a step; 0: unknown."""
        table, plain_s = self._tables.get(num_sequences), self.plain_s(num_sequences)
        return table[num_drafts] * plain_s if table and plain_s and num_drafts < len(table) else 0.0

    def plain_s(self, num_sequences: int) -> float | None:
        """Time of a step without drafts; None: unknown."""
        fit = self._fits.get(num_sequences)
        return None if fit is None else fit.times([self._experts.step_s(num_sequences)])[0]


class _Fit:
    """Step time = a + b * the cost model's time of the experts + c * drafted tokens, fitted to the measured steps.

    All depths are fitted together, because a single depth's steps vary by a third with their experts. Older steps
    weigh less. Before there are many, b is near 1 and c near `_LEAST_ADDED` of a step.
    """

    def __init__(self, step_s: float, experts_s: float) -> None:
        """The first step, without drafts."""
        self._unit_s = step_s
        experts = min(experts_s / step_s, 1.0)
        self._scale = experts_s / experts if experts > 0 else 1.0
        """Experts' time that counts as one unit."""
        spread = np.array([_NOISE / 10.0, _NOISE / _SHARE_SPREAD, _NOISE / _ADDED_SPREAD])
        self._prior = np.diag(spread**2)
        self._prior_targets = self._prior @ np.array([1.0 - experts, 1.0, _LEAST_ADDED])
        # Weighted sums over the steps, in plain floats because most steps only add to them: of 1, experts e, drafts d,
        # ee, ed, dd; of the time, and of its products with e and d.
        self._sums = [0.0] * 9
        self._solved: tuple[float, float, float] | None = None
        self.num_steps = 0

    @property
    def is_due(self) -> bool:
        """Whether the coefficients follow the newest step."""
        return self.num_steps < _SETTLED or self.num_steps % _TABLE_AFTER == 0

    def add(self, num_drafts: int, experts_s: float, step_s: float) -> None:
        fixed, share, added = self._coefficients()
        experts, drafts = experts_s / self._scale, float(num_drafts)
        expected = fixed + share * experts + added * drafts
        # Other load on the machine only ever adds time.
        time = min(step_s / self._unit_s, _OUTLIER * expected)
        terms = (
            1.0,
            experts,
            drafts,
            experts * experts,
            experts * drafts,
            drafts * drafts,
            time,
            time * experts,
            time * drafts,
        )
        self._sums = [_KEPT_STEP * total + term for total, term in zip(self._sums, terms, strict=True)]
        self.num_steps += 1
        if self.is_due:
            self._solved = None

    def times(self, experts_s: Seq[float]) -> list[float]:
        """Seconds of a step with 0, 1, … drafts, given its experts' time."""
        fixed, share, added = self._coefficients()
        found: list[float] = []
        for drafts, each in enumerate(experts_s):
            time = fixed + share * each / self._scale + added * drafts
            # A step never takes less than one of fewer tokens.
            found.append(max(time, found[-1] if found else 1e-3))
        return [self._unit_s * time for time in found]

    def _coefficients(self) -> tuple[float, float, float]:
        if self._solved is None:
            one, e, d, ee, ed, dd, *right = self._sums
            left = np.array([[one, e, d], [e, ee, ed], [d, ed, dd]])
            found = np.linalg.solve(left + self._prior, np.array(right) + self._prior_targets)
            self._solved = float(found[0]), float(found[1]), float(found[2])
        return self._solved


class Probes:
    """Decides when a draft that does not seem to pay is verified all the same, because estimates may be wrong.

    Probes may lose a fixed share of the time: the nearer a draft is to paying, the more often it is tried.
    """

    def __init__(self, most: int) -> None:
        """most: most drafted tokens of a probe."""
        self.depth = 1
        """Drafted tokens of the next probe."""
        self._most = most
        self._allowed = 0.0
        """Loss that the steps since the last probe allow, in steps without drafts."""

    def passed(self) -> None:
        """A step without drafts."""
        self._allowed += _PROBE_SHARE

    def is_due(self, chances: Seq[float], times: Seq[float]) -> bool:
        """Whether the allowance covers the loss that a probe's chances and times let expect. times: of steps with 0, 1,
        … drafts, as multiples of the first."""
        depth = min(self.depth, len(chances), len(times) - 1)
        loss = times[depth] - 1.0 - sum(itertools.accumulate(chances[:depth], operator.mul))
        return bool(self._allowed >= max(loss, _LEAST_PROBE_LOSS))

    def begin(self) -> None:
        """A probe is made."""
        self._allowed = 0.0

    def judge(self, depth: int, num_accepted: int) -> None:
        """After a probe of which every token was accepted, the next one is deeper."""
        self.depth = min(2 * depth, self._most) if num_accepted == depth else 1


def choose_depths(chances: Seq[Seq[float]], times: Seq[float], num_sequences: int) -> list[int]:
    """Depth of each draft that yields the most expected tokens per time of the step.

    Args:
        chances: per draft, each token's probability given those before it.
        times: time of a step with 0, 1, … drafted tokens, in any unit. No more tokens than it has entries are drafted.
        num_sequences: decoding sequences in the step, those without a draft included; each yields a token in any case.
    """
    gains = []
    for number, own in enumerate(chances):
        gain = 1.0
        for depth, chance in enumerate(own):
            gain *= chance
            gains.append((-gain, depth, number))
    if len(chances) > 1:
        gains.sort()  # a token's gain is at most that of the one before it
    expected, best = float(num_sequences), 0
    best_rate = LEAST_GAIN * num_sequences / times[0]
    for count, ((gain, _, _), time) in enumerate(zip(gains, times[1:], strict=False), 1):
        expected -= gain
        if expected > best_rate * time:
            best, best_rate = count, expected / time
    depths = [0] * len(chances)
    for _, _, number in gains[:best]:
        depths[number] += 1
    return depths
