"""Speculative decoding in `twofold lab simulate`: fixed depths beside the engine's own choice, at a given acceptance.

The engine's `Speculator` chooses each step's depth by its price. Here its drafter is a die that is right as often as
the acceptance says. Accepted drafts have the trace's routing. A rejected draft has that of another token of the same
sequence, because a wrong token's routing is not recorded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import GenerationRequest, PlacementCounts, SamplingParams
from twofold.experts.device_split import split_slots
from twofold.experts.moe import MoeRuntime
from twofold.experts.profiles import MachineProfile
from twofold.step.draft_price import MoeTimes
from twofold.step.drafters.drafter import ModelDrafter
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import ScheduledSequence
from twofold.step.sequences import Sequence as DecodedSequence
from twofold.step.speculation import Speculator
from twofold.tools.lab.shapes import ModelShape
from twofold.tools.lab.systems import System
from twofold.tools.lab.trace import Trace


@dataclass(frozen=True)
class Drafting:
    """How a simulated run drafts."""

    acceptance: tuple[float, ...]
    """Probability by position that a draft is right, given that those before it are; the last one goes on."""
    depth: int
    """Drafted tokens per step, or the most of them."""
    adaptive: bool
    draft_us: float
    """The drafter's time for one token."""

    @property
    def label(self) -> str:
        return "off" if self.depth == 0 else "adaptive" if self.adaptive else f"depth {self.depth}"


@dataclass
class DraftedRun:
    """Sums of a simulated run."""

    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    total_us: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_us * 1e6


class _Unlimited:
    """Memory for drafts without a bound."""

    num_draft_records = None

    def can_grow(self, sequence: DecodedSequence, num_drafts: int = 0) -> bool:
        return True

    def grow(self, sequence: DecodedSequence, num_drafts: int = 0) -> None: ...

    def take_draft_records(self, sequence: DecodedSequence, count: int) -> tuple[int, ...]:
        return ()

    def drop_drafts(self, sequence: DecodedSequence, records: Sequence[int], kept: int) -> None: ...


class _Guesses(ModelDrafter):
    """A drafter whose tokens have no meaning: a die decides which are right. It knows how often it is right."""

    def __init__(self, token_us: float, chances: tuple[float, ...]) -> None:
        """chances: what it states of each position; the last one goes on."""
        self._token_us, self._chances = token_us, chances

    def pass_s(self, num_sequences: int) -> float:
        return 1e-6 * self._token_us * num_sequences

    def propose_all(self, sequences: Sequence[DecodedSequence], depths: Sequence[int]) -> list[Draft]:
        self.spent_s += 1e-6 * self._token_us * sum(depths)
        return [self._draft(depth) for depth in depths]

    def _draft(self, depth: int) -> Draft:
        last = len(self._chances) - 1
        stated = tuple(self._chances[min(position, last)] for position in range(depth))
        return Draft((0,) * depth, stated) if depth else NOTHING

    def release(self, sequence: DecodedSequence) -> None: ...


class _SimulatedExperts:
    """What `MoeTimes` asks of a runtime, told by the simulation's sums."""

    def __init__(self, trace: Trace, cost: _core.CostModel) -> None:
        self.cost = cost
        self.shape = _RoutedSizes(trace.num_layers, trace.num_experts, trace.top_k)
        self._counts = PlacementCounts(0, 0, 0)

    def update(self, so_far: _core.SimulationResult) -> None:
        self._counts = PlacementCounts(so_far.num_hits, so_far.num_cpu, so_far.num_fetched)

    def counts(self) -> PlacementCounts:
        return self._counts

    @property
    def num_expert_runs(self) -> int:
        return self._counts.hits + self._counts.cpu_misses + self._counts.fetched


@dataclass(frozen=True)
class _RoutedSizes:
    num_layers: int
    num_experts: int
    top_k: int


class _Simulation:
    """Composes the steps of all sequences of a trace, one after the other."""

    def __init__(self, trace: Trace, cost: _core.CostModel, drafting: Drafting) -> None:
        self.run = DraftedRun()
        self._drafting, self._offsets = drafting, trace.offsets
        self._experts = _SimulatedExperts(trace, cost)
        draw = random.Random(1)  # noqa: S311
        self._acceptance_draws = [draw.random() for _ in range(int(trace.offsets[-1]))]
        """One number per token, below which an acceptance makes its draft right: runs of all depths meet the same."""
        self._drafter = _Guesses(drafting.draft_us, drafting.acceptance)
        self._speculator = None if drafting.depth == 0 else self._opened()
        self._sequence: DecodedSequence | None = None
        self._number = -1
        self._row = self._begin = self._end = 0
        self._item: ScheduledSequence | None = None
        self._accepted = 0
        self._before_us = 0.0

    def _opened(self) -> Speculator:
        config = SpeculativeConfig(
            "mtp", num_speculative_tokens=self._drafting.depth, adaptive=self._drafting.adaptive
        )
        return Speculator(config, _Unlimited(), MoeTimes(cast(MoeRuntime, self._experts)), self._drafter)

    def next_rows(self, so_far: _core.SimulationResult) -> list[int]:
        """Rows of the next step; see `_core.simulate_steps`."""
        self._end_step(so_far)
        while self._row == self._end:
            self._number += 1
            if self._number + 1 >= len(self._offsets):
                return []
            self._begin = self._row = int(self._offsets[self._number])
            self._end = int(self._offsets[self._number + 1])
            request = GenerationRequest((0,), SamplingParams())
            most = self._end - self._begin + 1
            self._sequence = DecodedSequence(self._number, request, [0, 0], most)
        assert self._sequence is not None
        self._item = ScheduledSequence(self._sequence, 1, samples=True)
        if self._speculator is not None:
            (self._item,) = self._speculator.draft([self._item], room=self._drafting.depth) or [self._item]
        return self._rows(len(self._item.drafts))

    def _rows(self, depth: int) -> list[int]:
        chances = self._drafting.acceptance
        self._accepted = 0
        while self._accepted < depth:
            if (
                self._acceptance_draws[self._row + self._accepted]
                >= chances[min(self._accepted, len(chances) - 1)]
            ):
                break
            self._accepted += 1
        right = range(self._row, self._row + 1 + self._accepted)
        draw = random.Random(right.stop)  # noqa: S311
        return [*right, *(draw.randrange(self._begin, self._end) for _ in range(depth - self._accepted))]

    def _end_step(self, so_far: _core.SimulationResult) -> None:
        if self._item is None or self._sequence is None:
            return
        depth = len(self._item.drafts)
        now_us = so_far.total_us + 1e6 * self._drafter.spent_s
        self._experts.update(so_far)
        if self._speculator is not None:
            if depth:
                self._speculator.verified(self._item, self._accepted, has_ended=False)
            step_s = 1e-6 * (now_us - self._before_us) - self._speculator.newest.drafting_s
            self._speculator.step_done([self._item], 1, 1 + depth, step_s)
        self._before_us = now_us
        self._row += 1 + self._accepted
        self._sequence.token_ids.extend([0] * (1 + self._accepted))
        run = self.run
        run.num_steps, run.total_us = run.num_steps + 1, now_us
        run.num_tokens += 1 + self._accepted
        run.num_drafted, run.num_accepted = run.num_drafted + depth, run.num_accepted + self._accepted
        self._item = None


def simulate_drafting(
    trace: Trace,
    system: System,
    shape: ModelShape,
    profile: MachineProfile,
    drafting: Drafting,
    *,
    slots: float,
    split: Sequence[float] = (1.0,),
    prior_usage: Sequence[float] = (),
) -> DraftedRun:
    """Decode the sequences one after the other, as `simulate_system` does, with drafts."""
    num_experts = trace.num_layers * trace.num_experts
    cost = shape.cost_model(profile)
    play = _Simulation(trace, cost, drafting)
    config = _core.SchedulerConfig(
        trace.num_layers,
        trace.num_experts,
        trace.top_k,
        split_slots(round(slots * num_experts), split, num_experts),
        prior_usage=list(prior_usage),
        **system.options,
    )
    dense_us = shape.dense_us(profile, trace.num_layers)
    _core.simulate_steps(trace.native, cost, config, dense_us, play.next_rows)
    return play.run


def drafting_rows(
    trace: Trace,
    systems: Sequence[System],
    shape: ModelShape,
    profile: MachineProfile,
    slots: Sequence[float],
    *,
    acceptance: tuple[float, ...],
    depths: Sequence[int],
    split: Sequence[float] = (1.0,),
    prior_usage: Sequence[float] = (),
) -> Iterator[dict[str, Any]]:
    """One row per size, system and depth: off, the fixed depths, and the engine's choice up to the deepest.

    A drafted token takes the drafter one layer's share of a step without drafts, as an MTP layer does.
    """
    for share in slots:
        for system in systems:

            def run(
                depth: int, adaptive: bool, draft_us: float, share: float = share, system: System = system
            ) -> tuple[str, DraftedRun]:
                drafting = Drafting(acceptance, depth, adaptive, draft_us)
                found = simulate_drafting(
                    trace, system, shape, profile, drafting, slots=share, split=split, prior_usage=prior_usage
                )
                return drafting.label, found

            off = run(0, adaptive=False, draft_us=0.0)
            draft_us = off[1].total_us / off[1].num_steps / trace.num_layers
            runs = [off, *(run(depth, adaptive=False, draft_us=draft_us) for depth in depths)]
            runs.append(run(max(depths), adaptive=True, draft_us=draft_us))
            for label, found in runs:
                yield {
                    "trace": trace.name,
                    "model": shape.name,
                    "profile": profile.name,
                    "slots": share,
                    "system": system.name,
                    "acceptance": list(acceptance),
                    "drafts": label,
                    "tokens_per_s": found.tokens_per_s,
                    "speed": found.tokens_per_s / off[1].tokens_per_s,
                    "drafted_per_step": found.num_drafted / found.num_steps,
                    "accepted": found.num_accepted / max(1, found.num_drafted),
                    "tokens_per_step": found.num_tokens / found.num_steps,
                    "clock": "virtual",
                }


def read_acceptance(text: str) -> tuple[float, ...]:
    """Acceptance by position: numbers such as 0.8,0.7, or a telemetry file whose newest run drafted.

    Raises:
        ConfigError: neither, or a run without drafts.
    """
    try:
        chances = tuple(float(part) for part in text.split(","))
    except ValueError:
        return _recorded_acceptance(text)
    if not all(0 <= chance <= 1 for chance in chances):
        raise ConfigError(
            f"--acceptance was given {text!r}; expected probabilities from 0 to 1 such as 0.8,0.7"
        )
    return chances


def _recorded_acceptance(text: str) -> tuple[float, ...]:
    if "://" not in text and not Path(text).is_file():
        raise ConfigError(
            f"--acceptance was given {text!r}; expected probabilities such as 0.8,0.7, or a telemetry database (its "
            "file or URL)"
        )
    from twofold.telemetry import queries  # needs the extra `telemetry`, which given probabilities do not

    db = queries.open_database(text if "://" in text else f"sqlite:///{text}")
    for run in queries.runs(db):
        found = queries.draft_acceptance(db, run)
        if found:
            return tuple(accepted / max(1, tried) for accepted, tried in found)
    raise ConfigError(
        f"--acceptance was given {text}; none of its runs verified drafts; record one with --speculative-config"
    )
