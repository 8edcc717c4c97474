"""Speculative decoding: adds drafts to scheduled decode tokens and learns from their verification.

A step computes a sequence's newest token and its drafts together. The sampler then draws token by token from their
logits, with the request's own random numbers, as it would in single steps. A draft is accepted where it equals the
token drawn. So outputs are the same bits with any drafter and any depth, greedy or sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import SpeculationCounts
from twofold.step.draft_price import Acceptance, ExpertTimes, Probes, StepTimes, choose_depths
from twofold.step.drafters import open_drafter
from twofold.step.drafters.drafter import Drafter, ModelDrafter
from twofold.step.drafts import Draft, DraftState
from twofold.step.model_drafting import ModelDrafting
from twofold.step.sequences import ScheduledSequence, Sequence

_PLAIN_STEPS: Final = 8
"""Steps without drafts of which one is measured: to measure each takes a small model one percent of its time."""
_SKIPPED_AFTER_NOTHING: Final = 2
"""Steps without a proposal after one that proposed nothing."""


class DraftMemory(Protocol):
    """Pages and records for drafts, without preempting any sequence."""

    def can_grow(self, sequence: Sequence, num_drafts: int = 0) -> bool: ...
    def grow(self, sequence: Sequence, num_drafts: int = 0) -> None: ...
    @property
    def num_draft_records(self) -> int | None:
        """Records available to drafts; None: layers keep none."""

    def take_draft_records(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Records for the state after each of `count` drafted steps, then the sequence's own; empty where layers keep
        none."""

    def drop_drafts(self, sequence: Sequence, records: Seq[int], kept: int) -> None:
        """Free pages that hold only rejected tokens, and all of `records` but the one at index `kept`."""


@dataclass(slots=True)
class StepDrafts:
    """Drafted tokens of one step."""

    num_drafted: int = 0
    num_accepted: int = 0
    estimated_s: float = 0.0
    """Time of the step as its price predicted it, on the run's clock; 0: unknown."""
    drafting_s: float = 0.0
    """Time that a drafter's own model took, on the run's clock."""


NO_DRAFTS: Final = StepDrafts()
"""Drafts of a step that has none; never changed."""


class _Proposal(NamedTuple):
    at: int
    """Index in the schedule."""
    state: DraftState
    chances: list[float]


class Speculator:
    """Drafts of one engine. Owned by its thread."""

    def __init__(
        self,
        config: SpeculativeConfig,
        memory: DraftMemory,
        experts: ExpertTimes,
        drafter: ModelDrafter | None = None,
    ) -> None:
        """drafter: that of the configured method, if it has a model of its own."""
        self._counts: Counter[str] = Counter()
        self._accepted_at: Counter[int] = Counter()
        self._estimated_s = self._measured_s = 0.0
        self.newest = StepDrafts()
        """Drafts of the newest step."""
        self.is_paused = False
        """Whether nothing is drafted for now."""
        self._config = config
        self._memory = memory
        self._drafters: dict[str, Drafter] = {}
        self._acceptance = Acceptance()
        self._times = StepTimes(experts, config.num_speculative_tokens)
        self._model = None if drafter is None else ModelDrafting(drafter, config, self._times)
        self._probes = Probes(config.num_speculative_tokens)
        self._probe: DraftState | None = None
        """The sequence whose draft in this step is a probe."""
        self._num_plain = 0
        self._needs_plain_step = True
        """Whether the next step without drafts is measured; otherwise one in several is."""
        self._is_used = config.method != "prediction"

    def draft(self, decoding: Seq[ScheduledSequence], room: int) -> list[ScheduledSequence] | None:
        """The decoding sequences with drafts of at most `room` tokens, for which pages and records are allocated; None
        if there are none."""
        self.newest = NO_DRAFTS
        if self.is_paused:
            return None
        if not self._is_used and not any(item.sequence.request.prediction for item in decoding):
            return None
        self._is_used = True
        proposals = [found for at, item in enumerate(decoding) if (found := self._propose(at, item.sequence))]
        if self._model is not None:
            proposals += self._modelled(self._model, decoding)
        if not proposals:
            return None
        depths = self._depths(proposals, len(decoding))
        if self._model is not None:
            for proposal, depth in zip(proposals, depths, strict=True):
                if depth == 0:  # drafting itself may have taken pages
                    self._memory.drop_drafts(decoding[proposal.at].sequence, (), 0)
        if not any(depths):
            return None
        self._times.begin()
        self.newest = StepDrafts(drafting_s=self.newest.drafting_s)
        drafted = list(decoding)
        for proposal, depth in zip(proposals, depths, strict=True):
            depth = self._affordable(decoding[proposal.at].sequence, min(depth, room))
            if depth > 0:
                drafted[proposal.at] = self._with_drafts(decoding[proposal.at], proposal.state, depth)
                room -= depth
                self.newest.num_drafted += depth
        estimated_s = self._times.estimated_s(len(decoding), self.newest.num_drafted)
        self.newest.estimated_s = estimated_s and estimated_s + self.newest.drafting_s
        return drafted

    def verified(self, item: ScheduledSequence, num_accepted: int, *, has_ended: bool) -> None:
        """Learn from a verified draft and free what it held. The sequence has the record at index `num_accepted`.
        has_ended: the answer ended within the draft, which is no rejection."""
        sequence, depth = item.sequence, len(item.drafts)
        state = sequence.drafting
        assert state is not None, "a draft without a drafter"
        num_judged = num_accepted if has_ended else depth
        self._acceptance.observe(state.drafter, state.cells, state.draft.chances[:num_judged], num_accepted)
        if state is self._probe:
            self._judge_probe(depth, num_accepted)
        sequence.num_rejected += depth - num_accepted
        self.newest.num_accepted += num_accepted
        self._counts.update(drafts=1, drafted=depth, accepted=num_accepted)
        self._accepted_at.update(range(num_accepted))
        self._memory.drop_drafts(sequence, item.records, num_accepted)

    @property
    def counts(self) -> SpeculationCounts | None:
        """Drafts since the start; None before the first one."""
        if not self._counts["drafts"]:
            return None
        deepest = max(self._accepted_at, default=-1)
        return SpeculationCounts(
            self._counts["drafts"],
            self._counts["drafted"],
            self._counts["accepted"],
            tuple(self._accepted_at[position] for position in range(deepest + 1)),
            self._estimated_s,
            self._measured_s,
        )

    def _judge_probe(self, depth: int, num_accepted: int) -> None:
        probed, self._probe = self._probe, None
        if self._model is not None and self._model.is_probe:
            self._model.judge_probe(depth, num_accepted)
            return
        self._probes.judge(depth, num_accepted)
        if num_accepted == depth and probed is not None:
            probed.passed(False)

    def ending(self, sequence: Sequence) -> None:
        """A sequence ends; it still has its pages."""
        if self._model is not None:
            self._model.drafter.ending(sequence)

    def finished(self, sequence: Sequence) -> None:
        """Free what the drafters of an ended sequence hold of it. One with a model may follow sequences that never
        drafted."""
        if self._model is not None:
            self._model.drafter.release(sequence)
        if sequence.drafting is not None and sequence.drafting.drafter in self._drafters:
            self._drafters[sequence.drafting.drafter].release(sequence)

    def drop(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Free what the drafts of a failed step held; its sequences are as before it."""
        for item in scheduled:
            if item.drafts:
                record = item.sequence.record
                kept = item.records.index(record) if record is not None and item.records else 0
                self._memory.drop_drafts(item.sequence, item.records, kept)

    def measures(self, scheduled: Seq[ScheduledSequence], num_sequences: int, num_tokens: int) -> bool:
        """Whether `step_done` is to get the time of the step that begins: with drafts always, without in one of
        several. To read the clock and to learn takes a small model one percent of a step.

        num_sequences: decoding ones. num_tokens: theirs, with drafts.
        """
        if not self._is_used:
            return False
        if num_tokens > num_sequences:
            return True
        self._num_plain += 1
        is_decode = len(scheduled) == num_sequences
        return is_decode and (self._needs_plain_step or self._num_plain % _PLAIN_STEPS == 0)

    def step_done(
        self, scheduled: Seq[ScheduledSequence], num_sequences: int, num_tokens: int, step_s: float
    ) -> None:
        """Learn the time of a step that `measures` asked for, on the run's clock, without its drafting."""
        if len(scheduled) > num_sequences:
            return
        if self.newest.estimated_s > 0:
            self._estimated_s += self.newest.estimated_s
            self._measured_s += step_s + self.newest.drafting_s
        self._needs_plain_step = False
        self._times.observe(num_sequences, num_tokens, step_s)

    # ---- proposals --------------------------------------------------------------------------------------------------

    def _propose(self, at: int, sequence: Sequence) -> _Proposal | None:
        # Most steps end here or at the proposal: this is written for them.
        state = sequence.drafting
        if state is None:
            request = sequence.request
            name = "prediction" if request.prediction else self._config.method
            # Recorded routing has one row per token that the answer really has.
            if request.return_routed_experts or (name == "prediction" and not request.prediction):
                return None
            state = sequence.drafting = DraftState(name)
        elif state.num_skipped > 0:
            state.num_skipped -= 1
            self._probes.passed()
            return None
        if self._model is not None and state.drafter == self._config.method:
            return None
        drafter = self._drafters.get(state.drafter) or self._drafter(state.drafter)
        draft = drafter.propose(sequence, self._config.num_speculative_tokens)
        if not draft.tokens:
            state.num_skipped = _SKIPPED_AFTER_NOTHING
            return None
        depth = sequence.max_tokens - sequence.num_generated - 1
        if depth < 1:
            return None
        state.draft = Draft(draft.tokens[:depth], draft.chances[:depth])
        return _Proposal(at, state, self._acceptance.chances(state.drafter, state.cells, state.draft.chances))

    def _modelled(self, model: ModelDrafting, decoding: Seq[ScheduledSequence]) -> list[_Proposal]:
        """Drafts of the configured method's own model."""
        places, wanted = [], []
        for at, item in enumerate(decoding):
            sequence, state = item.sequence, item.sequence.drafting
            most = sequence.max_tokens - sequence.num_generated - 1
            if state is not None and state.drafter == self._config.method and most > 0:
                places.append(at)
                wanted.append((sequence, state, most))
        if not wanted:
            return []
        drafts = model.draft(wanted, len(decoding))
        if not drafts:
            self._needs_plain_step = True
            return []
        self.newest = StepDrafts(drafting_s=model.spent_s)
        proposals = []
        for at, (_, state, _), draft in zip(places, wanted, drafts, strict=True):
            state.draft = draft
            if draft.tokens:
                chances = self._acceptance.chances(state.drafter, state.cells, draft.chances)
                model.expect(chances)
                proposals.append(_Proposal(at, state, chances))
        return proposals

    def _drafter(self, name: str) -> Drafter:
        opened = self._drafters[name] = open_drafter(name, self._config)
        return opened

    def _depths(self, proposals: Seq[_Proposal], num_sequences: int) -> list[int]:
        if not self._config.adaptive:
            return [len(proposal.chances) for proposal in proposals]
        times = self._times.table(num_sequences)
        if times is None:
            self._needs_plain_step = True
            return [0] * len(proposals)
        if self.newest.drafting_s > 0 and (plain_s := self._times.plain_s(num_sequences)):
            times = [
                time + self.newest.drafting_s / plain_s for time in times
            ]  # spent already, whatever the depth
        depths = choose_depths([proposal.chances for proposal in proposals], times, num_sequences)
        if self._model is not None and self._model.is_probe:
            self._probe = proposals[0].state
            depths[0] = len(proposals[0].chances)
        for proposal, depth in zip(proposals, depths, strict=True):
            proposal.state.passed(depth == 0, proposal.chances[0])
        if any(depths):
            return depths
        self._probes.passed()
        if self._probes.is_due(proposals[0].chances, times):  # acceptance and times may have changed
            self._probes.begin()
            self._probe = proposals[0].state
            depths[0] = min(self._probes.depth, len(proposals[0].chances))
        return depths

    def _affordable(self, sequence: Sequence, depth: int) -> int:
        """The depth for which pages and records are free."""
        num_records = self._memory.num_draft_records
        if num_records is not None:
            depth = min(depth, num_records)
        while depth > 0 and not self._memory.can_grow(sequence, depth):
            depth -= 1
        return depth

    def _with_drafts(self, item: ScheduledSequence, state: DraftState, depth: int) -> ScheduledSequence:
        sequence = item.sequence
        self._memory.grow(sequence, depth)
        return ScheduledSequence(
            sequence,
            1 + depth,
            samples=True,
            drafts=state.draft.tokens[:depth],
            records=self._memory.take_draft_records(sequence, depth),
        )
