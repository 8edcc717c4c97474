"""`twofold lab oracle-share`: the share of an oracle's savings over LRU that an online policy reaches.

share = (LRU - policy) / (LRU - oracle), each the cost (misses + price * uploads) of a replay from an empty cache. LRU
and oracle have fixed slots per layer; the oracle is the cheaper of the offline policies. With `pooled` the bound may
also move slots between layers, as a policy with a shared pool does.

The cost of a whole trace hides its start, so the first tokens of a request are shown separately: fresh caches start at
sequences spread over the trace, each plays the next N tokens (continuing into the next sequence), and the costs are
summed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from twofold.api.errors import ConfigError
from twofold.experts.policies import POLICIES, check_names
from twofold.tools.lab.replay import (
    DEFAULT_PRICE,
    Row,
    add_common_arguments,
    counts_list,
    default_price,
    names_list,
    print_rows,
    replay_policy,
)
from twofold.tools.lab.report import Table
from twofold.tools.lab.run_trace import sources_of
from twofold.tools.lab.trace import Trace, make_trace

NUM_STARTS = 12


def first_tokens(trace: Trace, num_tokens: int, num_starts: int = NUM_STARTS) -> list[Trace]:
    """The next `num_tokens` from sequences spread evenly over the trace; starts with fewer tokens left are skipped."""
    starts = trace.offsets[: trace.num_sequences : max(1, trace.num_sequences // num_starts)]
    parts = []
    for begin in map(int, starts):
        end = begin + num_tokens
        if end > trace.num_tokens:
            break
        inner = trace.offsets[(trace.offsets > begin) & (trace.offsets < end)]
        probs = None if trace.probs is None else trace.probs[begin:end]
        offsets = np.concatenate([[begin], inner, [end]]) - begin
        parts.append(make_trace(trace.name, trace.ids[begin:end], probs, offsets, trace.num_experts))
    return parts


def share_rows(
    trace: Trace,
    policies: Sequence[str],
    slots: Sequence[float],
    price: float,
    *,
    tokens: Sequence[int] = (),
    batch: int = 1,
    prior_usage: Sequence[float] = (),
) -> Iterator[Row]:
    """One row per span (the whole trace, then each of `tokens`), size and policy.

    A share is None where LRU is optimal.
    """
    offline = [name for name, policy in POLICIES.items() if policy.offline]
    spans = [("all", [trace]), *((f"first {n}", first_tokens(trace, n)) for n in tokens)]
    for span, parts in spans:
        if not parts:
            continue
        for size in slots:
            replayed = partial(replay_policy, slots=size, price=price, batch=batch, prior_usage=prior_usage)

            def cost(
                policy: str, pool: bool | None, parts: list[Trace] = parts, replayed: Any = replayed
            ) -> float:
                """Misses + price * uploads over replays of the parts, each from an empty cache."""
                played = [replayed(part, policy, shared_pool=pool) for part in parts]
                return float(sum(counts.num_misses + price * counts.num_uploads for counts in played))

            lru = cost("lru", False)
            oracle = min(cost(name, False) for name in offline)
            pooled = min(oracle, *(cost(name, True) for name in offline))
            for policy in policies:
                saved = lru - cost(policy, None)
                yield {
                    "trace": trace.name,
                    "span": span,
                    "slots": size,
                    "policy": policy,
                    "price": price,
                    "cost_vs_lru": 1 - saved / lru if lru > 0 else 1.0,
                    "oracle_vs_lru": oracle / lru if lru > 0 else 1.0,
                    "share": saved / (lru - oracle) if lru > oracle else None,
                    "share_pooled": saved / (lru - pooled) if lru > pooled else None,
                }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `twofold lab oracle-share`."""
    add_common_arguments(parser)
    parser.add_argument(
        "--policies",
        type=names_list,
        default=["payback"],
        metavar="NAME,…",
        help="online policies to compare (default: payback)",
    )
    parser.add_argument(
        "--price",
        type=float,
        metavar="R",
        help=f"price of one upload, in misses (default: that of the telemetry URL's run, or {DEFAULT_PRICE})",
    )
    parser.add_argument(
        "--tokens",
        type=counts_list(1_000_000),
        default=[64, 300, 1000],
        metavar="N,…",
        help="prefixes of each request that are reported separately, in tokens (default: 64,300,1000)",
    )


def run(args: argparse.Namespace) -> int:
    """Print one row per trace, span, size and policy."""
    check_names(args.policies)
    if args.price is not None and not 0 <= args.price < float("inf"):
        raise ConfigError(f"--price {args.price} given; expected a number >= 0, in misses")
    rows: list[Row] = []
    for source in sources_of(args):
        trace, price = source.trace, default_price(source) if args.price is None else args.price
        played = trace.part(args.part)
        prior = (trace.part("first") if args.part == "second" else played).usage()
        for batch in args.batch:
            rows += share_rows(
                played,
                args.policies,
                args.slots,
                price,
                tokens=args.tokens,
                batch=batch,
                prior_usage=prior,
            )
    print_rows(rows, args, _table(rows), title="Share of the oracle's saving over LRU", value="cost_vs_lru")
    return 0


def _table(rows: Sequence[Row]) -> Table:
    shares = ("share", "share_pooled")
    shown = [
        row | {name: "-" if row[name] is None else f"{row[name]:.1%}" for name in shares} for row in rows
    ]
    columns = {
        "trace": "{trace}",
        "tokens": "{span}",
        "slots": "{slots:.0%}",
        "policy": "{policy}",
        "cost vs LRU": "{cost_vs_lru:.3f}",
        "oracle vs LRU": "{oracle_vs_lru:.3f}",
        "share": "{share}",
        "share (pooled oracle)": "{share_pooled}",
    }
    return Table.of(shown, columns)
