"""`twofold ctl resize`: change how expert slots and KV cache share the memory, without a restart."""

from __future__ import annotations

import argparse

from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, memory_lines, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("New sizes", "A size that is not given is unchanged.")
    group.add_argument(
        "--gpu-experts-ratio",
        type=float,
        metavar="SHARE",
        help="share of all experts that have a slot, 0.0-1.0",
    )
    group.add_argument(
        "--num-gpu-experts",
        type=int,
        metavar="N",
        help="expert slots per layer, on average, instead of a share",
    )
    group.add_argument(
        "--max-total-tokens", type=int, metavar="N", help="tokens the KV cache holds over all requests"
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    names = ("gpu_experts_ratio", "num_gpu_experts", "max_total_tokens")
    requested = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    found = AdminClient(args).ask("POST", "/resize", requested)
    return show(args, found, memory_lines(found["memory"]))
