"""`twofold placement show`: experts in slots layer by layer, of a running server or of a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from twofold.api.errors import ConfigError
from twofold.experts.dynamic_update import REASONS
from twofold.experts.placement_files import read_placement
from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, show
from twofold.tools.cli.terminal_text import ranges, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="file of `twofold placement export` or --cache-state (default: ask a running server)",
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.file is None:
        found = AdminClient(args).get("/placement/experts")
    else:
        mask, kind = read_placement(args.file)
        if kind == "statistics":
            raise ConfigError(f"{args.file} counts routed experts and places none; import it instead")
        found = {
            "model": f"{args.file} ({kind})",
            "strategy": None,
            "num_slots": int(mask.sum()),
            "num_experts": mask.shape[1],
            "resident": [np.flatnonzero(layer).tolist() for layer in mask],
            "dynamic_update": {},
        }
        if args.json:
            print(json.dumps(found))
            return 0
    return show(args, found, _lines(found))


def _lines(found: Mapping[str, Any]) -> list[str]:
    if not found["resident"]:
        return ["no expert slots: the CPU runs all experts", *update_lines(found["dynamic_update"])]
    strategy = f", strategy {found['strategy']}, policy {found['policy']}" if found["strategy"] else ""
    total = sum(map(len, found["resident"]))
    devices = found.get("devices", ())
    return [
        f"{found['model']}: {total} of {len(found['resident']) * found['num_experts']} experts in "
        f"{found['num_slots']} slots{strategy}",
        "",
        *table(
            ["layer", "resident", "of", *devices, "experts"],
            [
                [
                    layer,
                    len(experts),
                    found["num_experts"],
                    *(found["held_by"][layer].count(device) for device, _ in enumerate(devices)),
                    ranges(experts),
                ]
                for layer, experts in enumerate(found["resident"])
            ],
        ),
        *update_lines(found["dynamic_update"]),
    ]


def update_lines(counts: Mapping[str, int]) -> Iterable[str]:
    """Results of dynamic update; no lines if it is off."""
    if counts:
        yield ""
        yield "dynamic update: steps with prompt tokens"
        for reason, count in counts.items():
            yield f"{count:>8}  {reason}: {REASONS.get(reason, '')}"
