"""The price of a draft's depth: expected accepted tokens per second of the step.

A step that verifies m tokens reads the union of their experts, so its time grows with m. The cost model predicts by how
much, under the present share of resident experts; measured steps correct it. All times of the measured steps are kept
as multiples of the newest time of a step without drafts, because other load on a machine changes both alike.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final, Protocol

from twofold.experts.moe import MoeRuntime

_BINS: Final = 5
_POSITIONS: Final = 4
"""Positions in a draft with an acceptance of their own; later ones share the last."""
_STATED_WEIGHT: Final = 2.0
"""Trials that a drafter's own estimate counts for."""
_ALL_WEIGHT: Final = 4.0
"""Trials that the acceptance of all requests counts for in one request's."""
_KEPT: Final = 0.99
"""What a trial keeps of its weight when the next one is counted."""
LEAST_GAIN: Final = 1.02
"""How much better than no draft a draft must be, because times and chances are estimates."""
_REFRESH_AFTER: Final = 64
"""Steps after which residency and times without drafts are read again."""
_FIRST_REFRESH: Final = 1
"""The step after which that is done first."""
_PLAIN_AFTER: Final = 64
"""Measured steps after which one without drafts is measured again."""
_FORGET_AFTER: Final = 128
"""Measured steps after which a time gives way to the model's."""
_LEAST_ADDED: Final = 0.01
"""Time that each drafted token adds beside the experts', as a share of a plain step's."""
_GROWING_SHARE: Final = 0.5
"""Share of the deepest measured draft's added time that is taken to grow with depth; the rest is taken as fixed."""
_PREDICTED_WEIGHT: Final = 1.0
"""Measured steps that the model's time counts for."""
_COMMON_WEIGHT: Final = 4.0
"""Measured steps of a depth that those of all depths count for: a step's time varies with its experts."""
_MOST_DRAFTS: Final = 64
"""Most drafted tokens per step, of all sequences, where depths are chosen by price."""

Cells = dict[tuple[int, int], list[float]]
"""(accepted, tried) by position and by the drafter's own estimate, in `_BINS` bins."""


class Acceptance:
    """Estimates the probability that a drafted token is accepted, given that those before it in the draft are.

    By drafter, position, and the drafter's own estimate; for each request, its own trials correct those of all.
    """

    def __init__(self) -> None:
        self._of_drafter: dict[str, Cells] = {}

    def chances(self, drafter: str, own: Cells, stated: Seq[float]) -> list[float]:
        """Probability of each token of a draft. own: the request's trials."""
        every = self._of_drafter.setdefault(drafter, {})
        found = []
        for position, chance in enumerate(stated):
            cell = _cell(position, chance)
            accepted, tried = every.get(cell, _NONE)
            chance = (accepted + _STATED_WEIGHT * chance) / (tried + _STATED_WEIGHT)
            accepted, tried = own.get(cell, _NONE)
            found.append((accepted + _ALL_WEIGHT * chance) / (tried + _ALL_WEIGHT))
        return found

    def observe(self, drafter: str, own: Cells, stated: Seq[float], num_accepted: int) -> None:
        """Count a verified draft. Tokens after the first rejected one say nothing."""
        for cells in (self._of_drafter.setdefault(drafter, {}), own):
            for position, chance in enumerate(stated[: num_accepted + 1]):
                trial = cells.setdefault(_cell(position, chance), [0.0, 0.0])
                trial[0] = _KEPT * trial[0] + (position < num_accepted)
                trial[1] = _KEPT * trial[1] + 1.0


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
        self._plain_s: dict[int, deque[float]] = {}
        """Newest times of steps without drafts, by number of sequences."""
        self._plain_at: dict[int, int] = {}
        """Step of the newest of them."""
        self._measured: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        """(step, time as a multiple of the above) of the newest steps with drafts, by sequences and drafts."""
        self._tables: dict[int, list[float]] = {}
        self._num_observed = 0

    def begin(self) -> None:
        """A step with drafts begins."""
        self._experts.begin()

    def observe(self, num_sequences: int, num_tokens: int, step_s: float) -> None:
        """Record a step without prompt tokens, of `num_tokens` tokens, drafts included."""
        self._num_observed += 1
        if self._num_observed % _REFRESH_AFTER == 0 or self._num_observed == _FIRST_REFRESH:
            self._experts.refresh()
            self._tables.clear()
        num_drafts = num_tokens - num_sequences
        if num_drafts > 0:
            self._experts.observe(num_tokens)
        if step_s <= 0:
            return
        if num_drafts == 0:
            times = self._plain_s.get(num_sequences)
            if times is None:
                times = self._plain_s[num_sequences] = deque(maxlen=16)
            times.append(step_s)
            self._plain_at[num_sequences] = self._num_observed
            return
        plain_s = self.plain_s(num_sequences)
        if plain_s is None:
            return
        newest = self._measured.setdefault((num_sequences, num_drafts), deque(maxlen=24))
        newest.append((self._num_observed, step_s / plain_s))
        self._tables.pop(num_sequences, None)

    def table(self, num_sequences: int) -> list[float] | None:
        """Times of steps with 0, 1, … drafts as multiples of the first; None where a step without must be measured."""
        if self._num_observed - self._plain_at.get(num_sequences, -_PLAIN_AFTER) >= _PLAIN_AFTER:
            return None
        found = self._tables.get(num_sequences)
        if found is None:
            plain_s = self.plain_s(num_sequences)
            if plain_s is None:
                return None
            found = self._tables[num_sequences] = self._made_table(num_sequences, plain_s)
        return found

    def predicted_s(self, num_sequences: int, num_drafts: int) -> float:
        """Time of a step; 0: unknown."""
        table, plain_s = self._tables.get(num_sequences), self.plain_s(num_sequences)
        return table[num_drafts] * plain_s if table and plain_s and num_drafts < len(table) else 0.0

    def _made_table(self, num_sequences: int, plain_s: float) -> list[float]:
        """Measured times, and between and after them the model's."""
        most = min(num_sequences * self._depth, _MOST_DRAFTS)
        added = [
            self._added_s(num_sequences, num_sequences + drafts) / plain_s + _LEAST_ADDED * drafts
            for drafts in range(most + 1)
        ]
        known = [(0, 1.0), *self._known(num_sequences, added)]
        for at in range(len(known) - 2, 0, -1):  # a step never takes longer than one of more tokens
            known[at] = known[at][0], min(known[at][1], known[at + 1][1])
        table = [1.0]
        for (first, begin), (last, end) in itertools.pairwise(known):
            slope = (end - begin) / (added[last] - added[first])
            table += [begin + slope * (added[at] - added[first]) for at in range(first + 1, last + 1)]
        first, begin = known[-1]
        slope = 1.0 if first == 0 else max(1.0, _GROWING_SHARE * (begin - 1.0) / added[first])
        table += [begin + slope * (added[at] - added[first]) for at in range(first + 1, most + 1)]
        return table

    def _known(self, num_sequences: int, added: Seq[float]) -> list[tuple[int, float]]:
        """(drafts, time) for which steps were measured. added: the model's times without the first."""
        fresh = [
            (drafts, typical(times), len(times))
            for drafts in range(1, len(added))
            if (times := self._fresh(num_sequences, drafts))
        ]
        if not fresh:
            return []
        first = added[fresh[0][0]]
        measured = _PREDICTED_WEIGHT * first + sum(count * (time - 1.0) for _, time, count in fresh)
        predicted = _PREDICTED_WEIGHT * first + sum(count * added[drafts] for drafts, _, count in fresh)
        ratio = max(measured / predicted, 0.0)
        return [
            (
                drafts,
                max(
                    (count * time + _COMMON_WEIGHT * (1.0 + ratio * added[drafts]))
                    / (count + _COMMON_WEIGHT),
                    1.0,
                ),
            )
            for drafts, time, count in fresh
        ]

    def _fresh(self, num_sequences: int, num_drafts: int) -> list[float]:
        oldest = self._num_observed - _FORGET_AFTER
        return [time for step, time in self._measured.get((num_sequences, num_drafts), ()) if step > oldest]

    def plain_s(self, num_sequences: int) -> float | None:
        """Time of a step without drafts; None: unknown."""
        times = self._plain_s.get(num_sequences)
        return typical(times) if times else None

    def _added_s(self, num_sequences: int, num_tokens: int) -> float:
        return self._experts.step_s(num_tokens) - self._experts.step_s(num_sequences)


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
