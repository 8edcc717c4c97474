"""`twofold lab cache-prior`: quality loss and hit-rate gain of routing bias towards experts in slots.

A text is decoded by teacher forcing on an emulated machine, token by token, with each prior from the same cold start.
The results are compared with the router's own choice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.experts.profiles import MachineProfile
from twofold.experts.slot_plan import SlotPlan
from twofold.tools.lab.decoded_text import (
    DecodedText,
    add_machine_arguments,
    add_text_arguments,
    quality_columns,
    quality_row,
    read_arguments,
)

PRIORS: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def rows(
    text: DecodedText, profile: MachineProfile, slots: SlotPlan, priors: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """One row per prior."""
    source = text.at_once()
    for prior in priors:
        placed = text.token_by_token(profile, slots.with_options(cache_prior=prior))
        quality = text.quality(source, placed)
        yield {
            "prior": prior,
            "hit_rate": placed.hit_rate,
            "tokens_per_s": placed.tokens_per_s,
            "quality": quality_row(quality),
            "text": quality_columns(quality),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_text_arguments(parser)
    add_machine_arguments(parser)
    parser.add_argument(
        "--priors",
        default=",".join(map(str, PRIORS)),
        metavar="R,…",
        help="0.0 to 0.9 each (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        priors = [float(part) for part in args.priors.split(",")]
    except ValueError:
        priors = []
    if not priors or not all(0.0 <= prior <= 0.9 for prior in priors):
        raise ConfigError(
            f"--priors was given {args.priors!r}; it takes numbers from 0.0 to 0.9, such as 0.1,0.2"
        )
    text, profile, slots = read_arguments(args)
    found = list(rows(text, profile, slots, priors))
    texts = [row.pop("text") for row in found]
    if args.json:
        print(json.dumps({"profile": profile.name, "slots": args.slots, "clock": "virtual", "rows": found}))
        return 0
    print(
        f"{sum(map(len, text.sequences))} tokens, read as if generated; {args.slots:.0%} of the experts in slots of "
        f"{profile.name}; KL divergence in nats from the router's own choice"
    )
    print("  prior   hit rate   KL mean     99 %   same token   perplexity        tokens/s (virtual clock)")
    for row, columns in zip(found, texts, strict=True):
        print(f"  {row['prior']:<5} {100 * row['hit_rate']:>8.1f} % {columns}   {row['tokens_per_s']:>10.1f}")
    return 0
