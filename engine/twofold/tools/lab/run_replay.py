"""Replays the steps of a recorded run through the engine's scheduler, under its own cache policy and under others.

Every step keeps its tokens, prompts included, and the slots begin as the run's did. So the replay of the run's own
policy should hit as often as the run; how near it comes says how far the others can be trusted. Times are predictions
on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.experts.policies import POLICIES
from twofold.experts.profiles import MachineProfile
from twofold.telemetry import queries
from twofold.tools.lab.shapes import ModelShape
from twofold.tools.lab.trace import make_trace


@dataclass(frozen=True)
class StepsReplay:
    """Decode steps under one policy; figures are per token of all layers."""

    policy: str
    offline: bool
    """Whether the policy knows the future."""
    hit_rate: float
    """Share of distinct experts by layer and step that were on the GPU."""
    uploads_per_token: float
    moe_us_per_token: float
    """Predicted time in MoE layers."""


def replay_steps(
    run: queries.Run,
    steps: queries.RecordedSteps,
    policies: Sequence[str],
    *,
    shape: ModelShape,
    machine: MachineProfile,
    residents: npt.NDArray[np.uint8],
    first_counted_step: int,
    foreseen: float | None,
) -> Iterator[StepsReplay]:
    """One result per policy, yielded as it finishes; none without tokens.

    Args:
        shape: the model's.
        machine: the run's, of one device.
        residents: [layers, experts], not 0 where an expert was in a slot before the first step.
        first_counted_step: decode steps from this one on are counted; a policy learns from those before.
        foreseen: share of the prefetched experts that their step used; None: the run did not prefetch. Routers'
            look-ahead is not recorded, so each expert is taken as foreseen with this probability.
    """
    if not steps.num_tokens:
        return
    trace = make_trace(run.model, steps.ids, steps.weights, None, steps.num_experts)
    there = np.zeros((run.num_layers, steps.num_experts), np.uint8)
    there[: len(residents), : residents.shape[1]] = residents != 0
    expected = np.zeros(0, np.uint16) if foreseen is None else _expected(steps, foreseen)
    settings = queries.run_settings(run)
    play = partial(
        _core.simulate_recorded,
        trace.native,
        steps.begins,
        steps.requests,
        steps.positions,
        steps.decodes,
        expected,
        int(np.searchsorted(steps.step, first_counted_step)),
        there,
        shape.cost_model(machine),
        dense_us=shape.dense_us(machine, run.num_layers),
        token_us=shape.dense_token_us(machine, run.num_layers),
    )
    for policy in policies:
        entry = POLICIES[policy]
        wanted = entry.prefetches == "auto" or (
            entry.prefetches != "never" and settings.get("prefetch") == "on"
        )
        config = _core.SchedulerConfig(
            run.num_layers,
            steps.num_experts,
            run.top_k,
            run.num_slots,
            policy=policy,
            prefetch=foreseen is not None and wanted,
        )
        result = play(config)
        if not result.num_tokens:
            return
        yield _figures(policy, result)


def _figures(policy: str, result: _core.SimulationResult) -> StepsReplay:
    uses = result.num_hits + result.num_cpu + result.num_fetched
    return StepsReplay(
        policy=policy,
        offline=POLICIES[policy].offline,
        hit_rate=result.num_hits / uses,
        uploads_per_token=result.num_uploads / result.num_tokens,
        moe_us_per_token=result.moe_us / result.num_tokens,
    )


def _expected(steps: queries.RecordedSteps, foreseen: float) -> npt.NDArray[np.uint16]:
    """The routed experts, of which all but a share `foreseen` are replaced by others; the same at each call."""
    random = np.random.default_rng(0)
    wrong = random.random(steps.ids.shape) >= foreseen
    others = random.integers(steps.num_experts, size=steps.ids.shape)
    return np.where(wrong, others, steps.ids).astype(np.uint16)
