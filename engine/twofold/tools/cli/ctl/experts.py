"""`twofold ctl experts`: record which experts are routed to; the server writes the file at its configured path."""

from __future__ import annotations

import argparse
from typing import Any

from twofold.api.errors import ConfigError
from twofold.api.placement_config import RECORDER_MODES
from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("status", "start", "stop", "dump"),
        default="status",
        help="what to do with the recording (default: status)",
    )
    parser.add_argument(
        "--mode",
        choices=RECORDER_MODES,
        help="what start records (default: the server's --expert-distribution-recorder-mode)",
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.mode is not None and args.action != "start":
        raise ConfigError(f"--mode was given to {args.action}; only start takes it")
    client = AdminClient(args)
    if args.action == "status":
        found = client.get("/experts")
    else:
        body = {"mode": args.mode} if args.mode else None
        found = client.ask("POST", f"/experts/{args.action}", body)
    return show(args, found, _lines(found))


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    if "recording" in found:
        lines.append("recording" if found["recording"] else "not recording")
    if found.get("discarded_passes"):
        lines.append(f"{found['discarded_passes']} forward passes were discarded before they were dumped")
    if "mode" in found:
        rate = "" if found["hit_rate"] is None else f", hit rate {100 * found['hit_rate']:.1f} %"
        lines.append(
            f"{found['mode']}: {found['forward_passes']} forward passes, {found['tokens']} tokens, "
            f"{found['routed_experts']} routed experts, {found['gpu_experts']} of them on the GPU{rate}"
        )
    if found.get("dropped_passes"):
        lines.append(
            f"kept {found['kept_passes']} passes; {found['dropped_passes']} older ones are in the totals only"
        )
    lines += found.get("files", [])
    return lines
