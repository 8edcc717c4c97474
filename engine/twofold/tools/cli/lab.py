"""`twofold lab`: replays recorded routing through the scheduling core, to compare policies, systems and machines."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType
from typing import Final

_ACTIONS: Final = {
    "kv-cache": "compare KV cache types: bytes, and KL divergence from float32 on a text",
    "oracle-share": "compare a cache policy's saving over LRU with an oracle's, with request starts separate",
    "cache-prior": "measure --cache-prior: quality lost, expert hits gained",
    "deferral": "measure expert deferral: quality lost, decode speed gained on an emulated machine",
    "fleet": "find how many replicas of which machine hold an objective for a load",
    "record": "record the expert routing of a text file as a trace",
    "prefetch": "measure decode speed with and without prefetch, on emulated machines",
    "replay": "replay a trace through cache policies: hits, uploads, cost",
    "simulate": "predict tokens/s of a model on a machine, and of other systems' rules",
}
"""Actions, each a module of twofold.tools.lab with add_arguments(parser) and run(args) -> exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `twofold lab`."""
    actions = parser.add_subparsers(dest="lab_action", required=True, metavar="ACTION")
    for name, summary in _ACTIONS.items():
        described = summary[:1].upper() + summary[1:] + "."
        action = actions.add_parser(name, help=summary, description=described, allow_abbrev=False)
        _module(name).add_arguments(action)


def run(args: argparse.Namespace) -> int:
    """Run the parsed action."""
    return int(_module(args.lab_action).run(args))


def _module(action: str) -> ModuleType:
    return importlib.import_module(f"twofold.tools.lab.{action.replace('-', '_')}")
