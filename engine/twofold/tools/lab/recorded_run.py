"""What-if questions about a window of a recorded run: other cache policies, other plans, other machines.

The dashboard's door to the lab. Takes what `telemetry.queries` read and computes with the core; reads no database.
Times of machines are predictions on a virtual clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ConfigError
from twofold.experts.policies import POLICIES
from twofold.experts.profiles import (
    MachineProfile,
    load_profile,
    shipped_profiles,
)
from twofold.telemetry import queries
from twofold.tools.lab.cards import CARDS as CARDS
from twofold.tools.lab.cards import HOSTS as HOSTS
from twofold.tools.lab.cards import Basis as Basis
from twofold.tools.lab.cards import Card, with_card
from twofold.tools.lab.cards import pcie_of as pcie_of
from twofold.tools.lab.cards import routing_like as routing_like
from twofold.tools.lab.replay import DEFAULT_PRICE, replay_policy
from twofold.tools.lab.run_replay import StepsReplay as StepsReplay
from twofold.tools.lab.run_replay import replay_steps as _replay_steps
from twofold.tools.lab.run_trace import machine_of as machine_of
from twofold.tools.lab.run_trace import price_of
from twofold.tools.lab.run_trace import shape_of as shape_of
from twofold.tools.lab.run_trace import trace_of as trace_of
from twofold.tools.lab.shapes import SHAPES as SHAPES
from twofold.tools.lab.shapes import ModelShape
from twofold.tools.lab.simulate import simulate_system, slots_for_vram
from twofold.tools.lab.systems import SYSTEMS
from twofold.tools.lab.trace import Trace, make_trace

_KV_GB: Final = 1.0
_MAX_TOKENS: Final = 600
"""Tokens that the planner plays per machine: 0.1 to 0.5 s for 48 layers of 128 experts."""


def policy_names() -> Mapping[str, str]:
    """Cache policies and what they do; offline ones know the future."""
    return {
        name: entry.help + (" (knows the future)" if entry.offline else "")
        for name, entry in POLICIES.items()
    }


def machine_names() -> tuple[str, ...]:
    """Machines with a shipped profile."""
    return shipped_profiles()


def machines(names: Sequence[str]) -> list[MachineProfile]:
    """Shipped profiles by name."""
    return [load_profile(name) for name in names]


def upload_price(run: queries.Run) -> float:
    """Price of one upload in misses, on the run's machine; the lab's default where that is unknown."""
    price = price_of(run)
    return DEFAULT_PRICE if price is None else price


def affordable_tokens(run: queries.Run) -> int:
    """Tokens whose replay takes about a second. The oracle needs 8 ns per token, layer, expert and slot of a layer."""
    slots = max(1, run.num_slots // max(1, run.num_layers), run.num_experts // 4 if not run.has_slots else 1)
    return max(50, int(1.0 / (8e-9 * max(1, run.num_layers) * max(1, run.num_experts) * slots)))


@dataclass(frozen=True)
class PolicyResult:
    """What one cache policy would have done on recorded tokens; per token of all layers."""

    policy: str
    offline: bool
    hit_rate: float
    uploads_per_token: float
    misses_per_token: float
    price: float

    @property
    def cost_per_token(self) -> float:
        """Misses, and uploads at their price in misses."""
        return self.misses_per_token + self.price * self.uploads_per_token


def replay_policies(
    played: Trace,
    policies: Sequence[str],
    *,
    num_slots: int,
    price: float,
    batch: int = 1,
    warm_up: Trace | None = None,
) -> Iterator[PolicyResult]:
    """One result per policy, yielded as it finishes. Online policies learn from `warm_up` first, offline ones start
    with empty slots; static ones keep its most used experts."""
    for policy in policies:
        counts = replay_policy(
            played,
            policy,
            slots=num_slots / (played.num_layers * played.num_experts),
            price=price,
            batch=batch,
            prior_usage=(warm_up or played).usage(),
            warm_up=warm_up,
        )
        yield PolicyResult(
            policy=policy,
            offline=POLICIES[policy].offline,
            hit_rate=counts.num_hits / max(1, counts.num_hits + counts.num_misses),
            uploads_per_token=counts.num_uploads / counts.num_tokens,
            misses_per_token=counts.num_misses / counts.num_tokens,
            price=price,
        )


def why_not_replayed(run: queries.Run) -> str:
    """Why the run's steps cannot be replayed; empty if they can."""
    if shape_of(run) is None or machine_of(run) is None:
        return "the run recorded no figures of its machine or model"
    return "" if len(run.devices) == 1 else "it has several devices"


def replay_steps(
    run: queries.Run,
    steps: queries.RecordedSteps,
    policies: Sequence[str],
    *,
    residents: npt.NDArray[np.uint8],
    first_counted_step: int,
    foreseen: float | None,
) -> Iterator[StepsReplay]:
    """`run_replay.replay_steps` on the run's own machine; nothing where `why_not_replayed` has a reason."""
    shape, machine = shape_of(run), machine_of(run)
    if shape is not None and machine is not None and not why_not_replayed(run):
        yield from _replay_steps(
            run,
            steps,
            policies,
            shape=shape,
            machine=machine,
            residents=residents,
            first_counted_step=first_counted_step,
            foreseen=foreseen,
        )


def plan_prices(shape: ModelShape, machine: MachineProfile, *, num_hits: int, num_misses: int) -> list[float]:
    """Predicted microseconds of a layer that fetches 0, 1, … all of its misses, on an idle link, one token each."""
    cost = shape.cost_model(machine)
    return [
        float(cost.decode_layer_us(num_hits, fetched, num_misses - fetched))
        for fetched in range(num_misses + 1)
    ]


@dataclass(frozen=True)
class MachineResult:
    """Predicted decode speed of the recorded tokens on one machine."""

    machine: str
    vram_gb: float | None
    slot_share: float
    tokens_per_s: float
    hit_rate: float
    link_busy: float


def simulate_machines(
    routing: queries.RecordedRouting,
    run: queries.Run,
    machines: Sequence[MachineProfile],
    *,
    slots: float,
    batch: int = 1,
) -> Iterator[MachineResult]:
    """Play the routing through the engine's scheduler on each machine; slots are the share of all experts.

    ConfigError if the model's sizes are unknown.
    """
    trace, shape = shortened(trace_of(routing, run)), _known_shape(run)
    for machine in machines:
        yield _simulated(trace, shape, machine, slots=slots, batch=batch)


def _known_shape(run: queries.Run) -> ModelShape:
    shape = shape_of(run)
    if shape is None:
        raise ConfigError(f"run {run.run_id} did not record the sizes of model {run.model}; record a new run")
    return shape


def _simulated(
    trace: Trace,
    shape: ModelShape,
    machine: MachineProfile,
    *,
    slots: float,
    batch: int,
    vram_gb: float | None = None,
) -> MachineResult:
    result = simulate_system(
        trace, SYSTEMS["twofold"], shape, machine, slots=slots, batch=batch, prior_usage=trace.usage()
    )
    active = result.num_hits + result.num_cpu + result.num_fetched
    return MachineResult(
        machine=machine.name,
        vram_gb=vram_gb,
        slot_share=slots,
        tokens_per_s=result.num_tokens / result.total_us * 1e6,
        hit_rate=result.num_hits / max(1, active),
        link_busy=result.link_us / result.total_us,
    )


def shortened(trace: Trace, max_tokens: int = _MAX_TOKENS) -> Trace:
    """The last tokens of a trace; its last sequences, the first of them cut."""
    begin = max(0, trace.num_tokens - max_tokens)
    offsets = [begin, *(int(at) for at in trace.offsets if at > begin)]
    probs = None if trace.probs is None else trace.probs[begin:]
    return make_trace(
        trace.name,
        trace.ids[begin:],
        probs,
        np.array(offsets, np.int64) - begin,
        num_experts=trace.num_experts,
    )


def plan_cards(
    trace: Trace,
    shape: ModelShape,
    host: MachineProfile,
    *,
    pcie: int,
    cards: Sequence[Card] = CARDS,
    batch: int = 1,
    limit_s: float = 20.0,
) -> Iterator[MachineResult | None]:
    """Predicted speed of each card in the computer `host`, yielded as it is computed; None where the model does not
    fit. pcie: generation of the computer's slot.

    Ends early after `limit_s` seconds, so that a page cannot hang.
    """
    until = time.monotonic() + limit_s
    played = shortened(trace)
    for card in cards:
        if time.monotonic() > until:
            return
        try:
            slots = slots_for_vram(shape, played, card.usable_gb, _KV_GB)
        except ConfigError:
            yield None
            continue
        machine = with_card(host, card, pcie=pcie)
        yield _simulated(played, shape, machine, slots=slots, batch=batch, vram_gb=card.vram_gib)
