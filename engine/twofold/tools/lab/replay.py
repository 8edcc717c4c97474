"""`twofold lab replay`: hits, uploads and cost of cache policies on recorded routing, against LRU and offline bounds.

There is no time here: an upload is usable at the next event of its layer. A policy's cost is misses + price * uploads;
a miss is one expert of one layer and step that had to run elsewhere, whatever its number of tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.experts.policies import POLICIES, check_names, described
from twofold.experts.profiles import shipped_profiles
from twofold.tools.lab.report import Table, write_report
from twofold.tools.lab.run_trace import DEFAULT_TOKENS, OWN_MACHINE, Source, sources_of
from twofold.tools.lab.shapes import MODEL_HELP, find_shape
from twofold.tools.lab.trace import Part, Trace

DEFAULT_PRICE: Final = 0.67
Row = dict[str, Any]


def replay_policy(
    trace: Trace,
    policy: str,
    *,
    slots: float,
    price: float,
    batch: int = 1,
    prior_usage: Sequence[float] | None = None,
    warm_up: Trace | None = None,
    shared_pool: bool | None = None,
) -> Any:
    """Replay one policy from an empty cache; a static policy starts with the most used experts of `prior_usage`.

    slots: share of all experts, 0 … 1. warm_up: tokens played first and not counted (online policies only).
    shared_pool: one pool for all layers, or fixed slots per layer; None: the policy's default.
    Returns the core's ReplayCounts. Raises ConfigError for an unknown policy or invalid numbers.
    """
    num_slots = round(slots * trace.num_layers * trace.num_experts)
    try:
        return _core.replay(
            trace.native,
            batch,
            num_slots,
            policy,
            price,
            prior_usage=list(prior_usage or []),
            shared_pool=shared_pool,
            warm_up=None if warm_up is None else warm_up.native,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def replay_rows(
    trace: Trace,
    policies: Sequence[str],
    slots: Sequence[float],
    batches: Sequence[int],
    price: float,
    *,
    part: Part = "second",
    warm: bool = False,
    expert_bytes: float | None = None,
    shared_pool: bool | None = None,
) -> Iterator[Row]:
    """One row per batch, size and policy, yielded as they finish; cost is relative to LRU with fixed slots per layer.

    Prior usage is that of the sequences outside `part`.
    """
    played = trace.part(part)
    before = trace.part("first") if part == "second" and trace.num_sequences > 1 else None
    prior = (before or played).usage()
    for batch, share in product(batches, slots):
        counts_of = partial(
            replay_policy,
            played,
            slots=share,
            price=price,
            batch=batch,
            prior_usage=prior,
            warm_up=before if warm else None,
        )
        lru = counts_of("lru", shared_pool=False)
        lru_cost = lru.num_misses + price * lru.num_uploads
        for policy in policies:
            counts = counts_of(policy, shared_pool=shared_pool)
            cost = counts.num_misses + price * counts.num_uploads
            row: Row = {
                "trace": trace.name,
                "part": part,
                "batch": batch,
                "slots": share,
                "policy": policy,
                "price": price,
                "hit_rate": counts.num_hits / max(1, counts.num_hits + counts.num_misses),
                "uploads_per_token": counts.num_uploads / counts.num_tokens,
                "misses_per_token": counts.num_misses / counts.num_tokens,
                "cost_per_token": cost / counts.num_tokens,
                "cost_vs_lru": cost / lru_cost if lru_cost > 0 else 1.0,
                "offline": POLICIES[policy].offline,
            }
            if expert_bytes is not None:
                row["upload_bytes_per_token"] = row["uploads_per_token"] * expert_bytes
            yield row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `twofold lab replay`."""
    add_common_arguments(parser)
    parser.add_argument(
        "--policies",
        type=names_list,
        default=list(POLICIES),
        metavar="NAME,…",
        help=f"cache policies (default: all). {described(tuple(POLICIES))}",
    )
    parser.add_argument(
        "--price",
        type=float,
        metavar="R",
        help=f"price of one upload, in misses (default: the profile's; without --profile that of the telemetry URL's "
        f"run, or {DEFAULT_PRICE} for a file)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"machine that sets the price: {', '.join(shipped_profiles())}, a file, or {OWN_MACHINE}: that of the "
        "telemetry URL's run",
    )
    parser.add_argument(
        "--pool",
        choices=("auto", "layer", "shared"),
        default="auto",
        help="layer: fixed slots per layer; shared: one pool; auto: what each policy is made for (default: auto)",
    )
    parser.add_argument(
        "--warm", action="store_true", help="warm up the policies on the first half, which is not counted"
    )


def run(args: argparse.Namespace) -> int:
    """Run the replays; print a table, or rows with --json, or write a page with --html."""
    check_names(args.policies)
    rows: list[Row] = []
    for source in sources_of(args):
        trace, price, expert_bytes = source.trace, args.price, None
        if args.profile is not None:
            profile, shape = source.profile(args.profile), find_shape(args.model, trace)
            expert_bytes = shape.expert_bytes
            if price is None:
                price = _core.default_upload_price(shape.cost_model(profile))
        price = default_price(source) if price is None else price
        if not 0 <= price < float("inf"):
            raise ConfigError(f"--price {price} given; expected a number >= 0, in misses")
        rows += replay_rows(
            trace,
            args.policies,
            args.slots,
            args.batch,
            price,
            part=args.part,
            warm=args.warm,
            expert_bytes=expert_bytes,
            shared_pool={"auto": None, "layer": False, "shared": True}[args.pool],
        )
    print_rows(rows, args, _table(rows), title="Cache policies on recorded routing", value="cost_vs_lru")
    return 0


def default_price(source: Source) -> float:
    """Price of an upload where none was given: that of the source's run, if known."""
    return DEFAULT_PRICE if source.price is None else source.price


def _table(rows: Sequence[Row]) -> Table:
    shown = [{**row, "mark": " (offline)" if row["offline"] else ""} for row in rows]
    columns = {
        "trace": "{trace}",
        "batch": "{batch}",
        "slots": "{slots:.0%}",
        "policy": "{policy}{mark}",
        "hit rate": "{hit_rate:.1%}",
        "uploads/token": "{uploads_per_token:.2f}",
        "cost/token": "{cost_per_token:.2f}",
        "cost vs LRU": "{cost_vs_lru:.3f}",
    }
    return Table.of(shown, columns)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that replay and simulate share."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="trace: npz of `lab record`, of --record-routing, or with ids, offsets and probs; or a telemetry URL "
        "(sqlite:///FILE, postgresql://…), whose recorded tokens are played",
    )
    parser.add_argument(
        "--run",
        type=int,
        metavar="N",
        help="run of a telemetry URL; `twofold telemetry runs` lists them (default: the last one)",
    )
    parser.add_argument(
        "--last-tokens",
        type=int,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=f"latest tokens that are read of a telemetry URL's run (default: {DEFAULT_TOKENS})",
    )
    parser.add_argument(
        "--slots",
        type=shares_list,
        default=[0.1, 0.25, 0.5, 0.75],
        metavar="SHARE,…",
        help="shares of all experts that have a slot, 0 to 1 (default: 0.1,0.25,0.5,0.75)",
    )
    parser.add_argument(
        "--batch",
        type=counts_list(),
        default=[1],
        metavar="N,…",
        help="batch sizes: sequences decoded at once (default: 1)",
    )
    parser.add_argument(
        "--part",
        choices=("second", "first", "all"),
        default="second",
        help="sequences to play: a half, or all. Static policies learn from the first half (default: second)",
    )
    parser.add_argument(
        "--num-experts", type=int, metavar="N", help="experts per layer, if the trace does not say"
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON array of rows")
    output.add_argument("--html", metavar="FILE", help="write a page with tables and plots")


def print_rows(
    rows: Sequence[Row],
    args: argparse.Namespace,
    table: Table,
    *,
    title: str,
    value: str,
    notes: Sequence[str] = (),
) -> None:
    """Write rows or table to the output that the arguments select; `notes` follow the table."""
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif args.html:
        write_report(args.html, title, rows, table, value=value, notes=notes)
        print(f"wrote {args.html}")
    else:
        print("\n".join([table.text(), *notes]))


def names_list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def number_list(
    kind: Callable[[str], float], expected: str, least: float, most: float
) -> Callable[[str], Any]:
    """A reader of comma-separated numbers, for argparse."""

    def read(text: str) -> list[float]:
        try:
            numbers = [kind(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(least <= number <= most for number in numbers):
            raise argparse.ArgumentTypeError(f"{text!r} given, expected {expected}")
        return numbers

    return read


shares_list: Final = number_list(float, "shares from 0 to 1 such as 0.1,0.25", 0, 1)


def counts_list(most: int = 1024) -> Callable[[str], Any]:
    return number_list(int, f"numbers from 1 to {most} such as 1,2,4", 1, most)
