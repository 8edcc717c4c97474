"""`twofold lab deferral`: quality loss of deferred experts, and their speed-up on an emulated machine.

A text is decoded by teacher forcing with each number of deferred experts: with all experts on the CPU, where most are
deferred, and with some in slots of an emulated accelerator, whose virtual clock gives the speed-up. The simulator
plays the same routing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.experts.cpu_cost import machine_cost_model
from twofold.experts.output_changes import dense_us
from twofold.experts.profiles import MachineProfile
from twofold.experts.slot_plan import SlotPlan
from twofold.tools.lab.decoded_text import (
    DecodedText,
    Reading,
    add_machine_arguments,
    add_text_arguments,
    quality_columns,
    quality_row,
    read_arguments,
)


def simulated_tokens_per_s(
    text: DecodedText, reading: Reading, profile: MachineProfile, slots: SlotPlan
) -> float:
    """Tokens/s that the simulator predicts for the reading's routing."""
    assert reading.events is not None
    result = _core.simulate(
        text.trace(reading.events),
        1,
        machine_cost_model(profile, text.store, text.cpu_curve(profile)),
        slots.scheduler_config(text.shape),
        dense_us(profile.cost_figures, text.dense_cost),
    )
    return float(result.num_tokens / result.total_us * 1e6)


def rows(text: DecodedText, profile: MachineProfile, slots: SlotPlan) -> Iterator[dict[str, Any]]:
    """One row per number of deferred experts, starting with none.

    Raises:
        ConfigError: the model routes a token to so few experts that none can be deferred.
    """
    most = text.shape.top_k - 2
    if most < 1:
        raise ConfigError(
            f"the model routes a token to {text.shape.top_k} experts, of which two stay immediate; expected 3 or more"
        )
    source = text.at_once()
    speed = simulated = 0.0
    for number in range(most + 1):
        plan = replace(slots, num_deferred=number)
        placed = text.token_by_token(profile, plan)
        predicted = simulated_tokens_per_s(text, placed, profile, plan)
        speed, simulated = speed or placed.tokens_per_s, simulated or predicted
        yield {
            "deferred": number,
            "on_cpu": quality_row(whole := text.quality(source, text.at_once(number))),
            "in_slots": quality_row(partly := text.quality(source, placed)),
            "tokens_per_s": placed.tokens_per_s,
            "gain": placed.tokens_per_s / speed,
            "simulated_gain": predicted / simulated,
            "hit_rate": placed.hit_rate,
            "texts": (quality_columns(whole), quality_columns(partly)),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    add_machine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    text, profile, slots = read_arguments(args)
    found = list(rows(text, profile, slots))
    texts = [row.pop("texts") for row in found]
    if args.json:
        print(json.dumps({"profile": profile.name, "slots": args.slots, "clock": "virtual", "rows": found}))
        return 0
    print(
        f"{sum(map(len, text.sequences))} tokens, read as if generated; top {text.shape.top_k}; KL divergence in nats "
        "from nothing deferred"
    )
    print("  experts        deferred   KL mean     99 %   same token   perplexity        speed   simulated")
    for at, name in enumerate(("all on the CPU", f"{args.slots:.0%} in slots")):
        for row, columns in zip(found, texts, strict=True):
            gains = f"   {row['gain']:>8.3f} {row['simulated_gain']:>11.3f}" if at else ""
            print(f"  {name:<14} {row['deferred']:>8} {columns[at]}{gains}")
    print(f"  speed: decode against none deferred, on the virtual clock of {profile.name}")
    return 0
