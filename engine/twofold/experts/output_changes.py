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


def settle(
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
    said: list[str] = []
    if slots.num_deferred:
        number, why = _deferred(slots.num_deferred, top_k, choice, cost, figures, dense)
        slots = replace(slots, num_deferred=number)
        if number:
            said.append(
                f"expert deferral: of a generated token's {number} least weighted experts those on the CPU join the "
                f"next MoE layer's output ({why}); answers differ from the model's and depend on where experts lie"
            )
        else:
            said.append(f"expert deferral is off: {why}")
    if slots.cache_prior:
        if choice.kind == "none" or slots.num_slots == 0:
            slots = replace(slots, cache_prior=0.0)
            said.append("cache-aware routing is off: no expert has a slot that could be favoured")
        else:
            said.append(
                f"cache-aware routing: a generated token takes an expert in a slot instead of one of up to "
                f"{1 / (1 - slots.cache_prior):.3g} times its score; answers differ from the model's and depend on "
                "where experts lie"
            )
    return slots, tuple(said)


def _deferred(
    asked: int,
    top_k: int,
    choice: AcceleratorChoice,
    cost: _core.CostModel,
    figures: Mapping[str, float],
    dense: DenseCost,
) -> tuple[int, str]:
    most = top_k - _IMMEDIATE
    if asked > most:
        raise ConfigError(
            f"--num-deferred-experts was given {asked}; the model routes a token to {top_k} experts, of which two stay "
            f"immediate: it takes 0{f' to {most}' if most > 0 else ''}"
        )
    if asked != AUTO:
        idle = choice.kind == "none"
        return asked, "without an accelerator there is nothing to gain by it" if idle else "as asked for"
    if most < 1:
        return 0, f"the model routes a token to {top_k} experts, of which two stay immediate"
    if choice.kind == "none":
        return 0, "without an accelerator the CPU has nothing to wait for"
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
        f"auto: the CPU waits {idle_us:.0f} us between two layers' experts, one of which takes it {expert_us:.0f} us"
    )


def dense_us(figures: Mapping[str, float], dense: DenseCost) -> list[float]:
    """Times of one token's dense stretches on the accelerator, by the emulated one's cost model."""
    return [
        figures["gpu_launch_us"]
        + max(num_bytes / figures["vram_bandwidth_gbps"], flops / figures["gpu_gflops"]) / 1e3
        for num_bytes, flops in zip(dense.bytes, dense.flops_per_token, strict=True)
    ]
