"""`twofold telemetry summary`: the main figures of a run."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `twofold telemetry summary`."""
    parser.add_argument("--run", type=int, metavar="ID", help="run to summarise (default: the last one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, url: str) -> int:
    """Print the summary."""
    from twofold.telemetry.summary import format_summary, summarise

    summary = summarise(url, run_id=args.run)
    print(json.dumps(summary, indent=2) if args.json else format_summary(summary))
    return 0
