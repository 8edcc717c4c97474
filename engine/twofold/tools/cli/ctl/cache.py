"""`twofold ctl cache`: contents and hit rates of expert slots and prefix cache."""

from __future__ import annotations

import argparse

from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, show
from twofold.tools.cli.terminal_text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drop-prefixes",
        action="store_true",
        help="clear the prefix cache in memory, except pages that running requests use",
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    client = AdminClient(args)
    if args.drop_prefixes:
        dropped = client.ask("POST", "/cache/drop_prefixes")
        return show(args, dropped, [f"dropped {dropped['dropped_pages']} pages"])
    found = client.get("/cache")
    prefixes, experts = found["prefix_cache"], found["experts"]
    share = 100 * prefixes["hit_tokens"] / max(prefixes["queried_tokens"], 1)
    lines = [
        f"prefix cache   {prefixes['pages']} pages, {prefixes['snapshots']} snapshots, "
        f"{prefixes['bytes'] / 1e6:.1f} MB; {prefixes['hit_tokens']} of {prefixes['queried_tokens']} prompt tokens "
        f"found ({share:.0f} %)"
    ]
    if found["expert_slots"]:
        routed = experts["hits"] + experts["cpu_misses"] + experts["fetched"]
        lines += [
            f"expert slots   {found['expert_slots']} ({found['slots_bytes'] / 1e6:.1f} MB), policy {found['policy']}; "
            f"{experts['hits']} hits of {routed} ({100 * experts['hits'] / max(routed, 1):.0f} %), "
            f"{experts['fetched']} fetched, {experts['uploads']} uploads, {experts['evictions']} evictions",
            "",
            *table(
                ["layer", "resident", "of"],
                [
                    [layer["layer"], layer["resident"], layer["of"]]
                    for layer in found["expert_slots_per_layer"]
                ],
            ),
        ]
    else:
        lines.append("expert slots   none: the CPU runs all experts")
    return show(args, found, lines)
