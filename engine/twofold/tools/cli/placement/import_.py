"""`twofold placement import`: load other experts into a running server's slots, between steps; requests continue."""

from __future__ import annotations

import argparse

import numpy as np

from twofold.api.errors import ConfigError
from twofold.experts.expert_statistics import read_statistics
from twofold.experts.placement import Mask, placement_mask
from twofold.experts.placement_files import read_placement
from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, show

_WITHOUT_FILE = ("uniform", "front-loading", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="file of `twofold placement export` or --cache-state, or statistics (.npz, .pt): the most used experts",
    )
    parser.add_argument(
        "--strategy",
        choices=_WITHOUT_FILE,
        help="fill all slots by this strategy instead of a file",
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if (args.file is None) == (args.strategy is None):
        raise ConfigError("give either a FILE or --strategy")
    client = AdminClient(args)
    found = client.get("/placement/experts")
    layers, experts, slots = len(found["resident"]), found["num_experts"], found["num_slots"]
    if not layers:
        raise ConfigError(f"the server at {args.url} has no expert slots")
    mask = _mask(args, layers, experts, slots)
    answer = client.ask(
        "POST", "/placement/experts", {"resident": [np.flatnonzero(layer).tolist() for layer in mask]}
    )
    lines = [f"placed {int(mask.sum())} experts in {slots} slots, {answer['uploaded']} of them were uploaded"]
    if not found["is_static"]:
        lines.append(f"policy {found['policy']} continues from there")
    return show(args, answer, lines)


def _mask(args: argparse.Namespace, layers: int, experts: int, slots: int) -> Mask:
    if args.strategy is not None:
        return placement_mask(args.strategy, layers, experts, slots)
    mask, kind = read_placement(args.file)
    if kind == "statistics":
        return placement_mask(
            "frequency", layers, experts, slots, counts=read_statistics(args.file, layers, experts)
        )
    if mask.shape != (layers, experts):
        raise ConfigError(
            f"{args.file} places {mask.shape[0]} layers of {mask.shape[1]} experts, the server's model has {layers} "
            f"layers of {experts}: the file is another model's"
        )
    return mask
