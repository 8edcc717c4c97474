"""`twofold placement export`: write the experts in a running server's slots to a file."""

from __future__ import annotations

import argparse

import numpy as np

from twofold.api.errors import ConfigError
from twofold.experts.placement_files import write_placement
from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="placement file to write (.npz), for `import` and --init-expert-location"
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    found = AdminClient(args).get("/placement/experts")
    if not any(found["resident"]):
        raise ConfigError(f"the server at {args.url} has no expert in a slot, so there is nothing to write")
    mask = np.zeros((len(found["resident"]), found["num_experts"]), np.bool_)
    for layer, experts in enumerate(found["resident"]):
        mask[layer, experts] = True
    write_placement(args.file, mask, str(found["model"]))
    written = {"file": args.file, "layers": len(mask), "experts": int(mask.sum())}
    return show(args, written, [f"wrote {args.file}: {written['experts']} experts of {len(mask)} layers"])
