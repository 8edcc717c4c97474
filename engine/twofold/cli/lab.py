"""`twofold lab`: recorded routing through the deciding core, to compare policies, systems and machines."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType
from typing import Final

_ACTIONS: Final = {
    "kv-cache": "what each type of KV cache costs: bytes, and KL divergence from float32 on a text",
    "oracle-share": "how much of an oracle's saving over LRU a policy makes, the start of a request apart",
    "cache-prior": "what favouring experts in slots costs in quality, and how many more hits it gives",
    "deferral": "what deferring experts costs in quality, and how much faster decode is on an emulated machine",
    "record": "the routing of a text file, read token by token, as a trace",
    "prefetch": "decode speed of a model with and without prefetch, on emulated machines",
    "replay": "hits, uploads and cost of cache policies on recorded routing",
    "simulate": "predicted tokens/s of a model on a machine, against other systems' rules",
}
"""Each is a module of twofold.lab with add_arguments(parser) and run(args) -> exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `twofold lab`."""
    actions = parser.add_subparsers(dest="lab_action", required=True, metavar="ACTION")
    for name, summary in _ACTIONS.items():
        described = summary[:1].upper() + summary[1:] + "."
        action = actions.add_parser(name, help=summary, description=described, allow_abbrev=False)
        _module(name).add_arguments(action)


def run(args: argparse.Namespace) -> int:
    """Carry out the parsed action."""
    return int(_module(args.lab_action).run(args))


def _module(action: str) -> ModuleType:
    return importlib.import_module(f"twofold.lab.{action.replace('-', '_')}")
