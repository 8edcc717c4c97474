"""`twofold placement export`: the experts that a running server has in slots, into a file."""

from __future__ import annotations

import argparse

import numpy as np

from twofold.api.errors import ConfigError
from twofold.cli.admin_client import AdminClient, add_server_arguments, show
from twofold.experts.placement_files import write_placement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="to write (.npz); `import` and --init-expert-location read it"
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    found = AdminClient(args).get("/placement/experts")
    if not any(found["resident"]):
        raise ConfigError(f"the server at {args.url} has no expert in a slot: there is nothing to write")
    mask = np.zeros((len(found["resident"]), found["num_experts"]), np.bool_)
    for layer, experts in enumerate(found["resident"]):
        mask[layer, experts] = True
    write_placement(args.file, mask, str(found["model"]))
    written = {"file": args.file, "layers": len(mask), "experts": int(mask.sum())}
    return show(args, written, [f"wrote {args.file}: {written['experts']} experts of {len(mask)} layers"])
