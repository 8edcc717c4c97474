"""`twofold pull`: download a model from a hub, or update it to the revision's newest commit."""

from __future__ import annotations

import argparse

from twofold.api.errors import ConfigError
from twofold.hub.pull import pull_model
from twofold.hub.reference import EXPECTED, parse_hub_name
from twofold.tools.cli.bar import Bar
from twofold.tools.cli.hub.model_path import bar_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", help="ORG/REPO[:QUANT][@REVISION]; QUANT chooses a GGUF file, such as Q4_K_M"
    )
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")


def run(args: argparse.Namespace) -> int:
    """0; prints the model's path."""
    model = parse_hub_name(args.model, args.revision)
    if model is None:
        raise ConfigError(
            f"{args.model!r} was given, which is a path here or no name of a model; expected {EXPECTED}"
        )
    with Bar("downloading", "GB", 1e-9) as bar:
        found = pull_model(model, bar_report(bar))
    print(found.path)
    return 0
