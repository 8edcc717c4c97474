"""`twofold ctl placement`: which experts are in slots, and their cache policy scores."""

from __future__ import annotations

import argparse

from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, show
from twofold.tools.cli.placement.show import update_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layer", type=int, metavar="N", help="MoE layer to show, counted from 0 (default: all)"
    )
    parser.add_argument(
        "--top",
        type=int,
        default=8,
        metavar="N",
        help="experts of highest value to list per layer (default: 8)",
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    found = AdminClient(args).get("/placement", layer=args.layer, top=args.top)
    lines = ["no expert slots: the CPU runs all experts"] if not found["layers"] else []
    mark = {"resident": "", "in flight": "~", "absent": "-"}
    for layer in found["layers"]:
        experts = "  ".join(
            f"{mark[expert['state']]}{expert['expert']} ({expert['worth']:.3g})"
            for expert in layer["experts"]
        )
        lines.append(f"layer {layer['layer']:>3}  {layer['resident']:>4} resident:  {experts}")
    if found["layers"]:
        lines.append("expert (value by the policy); - not in a slot, ~ being uploaded")
    lines += update_lines(found["dynamic_update"])
    return show(args, found, lines)
