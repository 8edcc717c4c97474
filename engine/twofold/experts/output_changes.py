"""Settings that change a model's outputs: expert deferral and cache-aware routing. Off by default.

Computes their effective values for this model and machine, and the notices shown with a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from twofold import _core
from twofold.api.errors import ConfigError

if TYPE_CHECKING:
    from twofold.experts.accelerator import AcceleratorChoice
    from twofold.experts.slot_plan import DenseCost, SlotPlan

AUTO: Final = -1
"""Value of `SlotPlan.num_deferred`: the fewest that keep the CPU busy."""
_IMMEDIATE: Final = 2


def effective_plan(
    slots: SlotPlan,
    top_k: int,
    choice: AcceleratorChoice,
    cost: _core.CostModel,
    figures: Mapping[str, float],
    dense: DenseCost,
) -> tuple[SlotPlan, tuple[str, ...]]:
    """The plan with effective deferral and prior, and the notices about them; no notices if neither was requested.

    cost, figures: of the machine for which an accelerator's layers are planned.

    Raises:
        ConfigError: more deferred experts than the model allows.
    """
    notices: list[str] = []
    if slots.num_deferred:
        number, why = _deferred(
            slots.num_deferred, top_k, choice=choice, cost=cost, figures=figures, dense=dense
        )
        slots = replace(slots, num_deferred=number)
        if number:
            notices.append(
                f"expert deferral: of each generated token's {number} lowest-weighted experts, those on the CPU are "
                f"added at the next MoE layer ({why}); answers differ from the model's and depend on expert placement"
            )
        else:
            notices.append(f"expert deferral is off: {why}")
    if slots.cache_prior:
        if choice.kind == "none" or slots.num_slots == 0:
            slots = slots.with_options(cache_prior=0.0)
            notices.append("cache-aware routing is off: there are no expert slots")
        else:
            notices.append(
                f"cache-aware routing: a generated token uses an expert in a slot instead of one with up to "
                f"{1 / (1 - slots.cache_prior):.3g} times its score; answers differ from the model's and depend on "
                "expert placement"
            )
    return slots, tuple(notices)


def _deferred(
    requested: int,
    top_k: int,
    choice: AcceleratorChoice,
    cost: _core.CostModel,
    figures: Mapping[str, float],
    dense: DenseCost,
) -> tuple[int, str]:
    most = top_k - _IMMEDIATE
    if requested > most:
        raise ConfigError(
            f"--num-deferred-experts was given {requested}; the model routes a token to {top_k} experts, of which two "
            f"are never deferred: expected 0{f' to {most}' if most > 0 else ''}"
        )
    if requested != AUTO:
        idle = choice.kind == "none"
        return requested, "no gain without an accelerator" if idle else "as requested"
    if most < 1:
        return 0, f"the model routes a token to {top_k} experts, of which two are never deferred"
    if choice.kind == "none":
        return 0, "without an accelerator the CPU never waits"
    return fewest_saturating(cost, figures, dense_us(figures, dense), most)


def fewest_saturating(
    cost: _core.CostModel, figures: Mapping[str, float], dense_us: Sequence[float], most: int
) -> tuple[int, str]:
    """Fewest deferred experts of one token, at most `most`, that keep the CPU busy between two MoE layers' experts; and
    the reason.

    dense_us: time between MoE layers, as `lab.shapes.ModelShape.dense_us`: before the first, ..., after the last.
    """
    idle_us = figures["handshake_us"] + figures["join_us"] + statistics.fmean(dense_us[1:-1] or [0.0])
    expert_us = cost.cpu_us([1]) - figures["handshake_us"]
    number = min(most, max(1, math.ceil(idle_us / expert_us)))
    return number, (
        f"auto: the CPU is idle for {idle_us:.0f} us between two MoE layers; one expert takes {expert_us:.0f} us"
    )


def dense_us(figures: Mapping[str, float], dense: DenseCost) -> list[float]:
    """Times of one token's dense stretches on the accelerator, by the emulated one's cost model."""
    return [
        figures["gpu_launch_us"]
        + max(num_bytes / figures["vram_bandwidth_gbps"], flops / figures["gpu_gflops"]) / 1e3
        for num_bytes, flops in zip(dense.bytes, dense.flops_per_token, strict=True)
    ]
