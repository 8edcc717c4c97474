"""`twofold telemetry summary`: summary of the last run in the telemetry database."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from twofold.api.errors import ConfigError

DATABASE_HERE = "twofold.db"
"""Database that `make run` writes in the repository."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `twofold telemetry`."""
    actions = parser.add_subparsers(dest="telemetry_action", required=True, metavar="ACTION")
    summary = actions.add_parser(
        "summary",
        help="print hit rate, uploads per token, bytes over PCIe and decode tokens/s of the last run",
        description="Print hit rate, uploads per token, bytes over PCIe and decode tokens/s of the last run.",
    )
    summary.add_argument(
        "--telemetry-url",
        default=os.environ.get("TWOFOLD_TELEMETRY_URL", ""),
        metavar="URL",
        help=f"database to read (default: TWOFOLD_TELEMETRY_URL, else {DATABASE_HERE} in this folder)",
    )
    summary.add_argument("--run", type=int, metavar="ID", help="run to summarise (default: the last one)")
    summary.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the parsed action; ConfigError if there is nothing to read."""
    url = args.telemetry_url
    if not url and Path(DATABASE_HERE).is_file():
        url = f"sqlite:///{DATABASE_HERE}"
    if not url:
        raise ConfigError(
            f"no telemetry database given and no {DATABASE_HERE} here; set --telemetry-url sqlite:///FILE or "
            "TWOFOLD_TELEMETRY_URL"
        )
    from twofold.telemetry.summary import format_summary, summarise

    summary = summarise(url, run_id=args.run)
    print(json.dumps(summary, indent=2) if args.json else format_summary(summary))
    return 0
