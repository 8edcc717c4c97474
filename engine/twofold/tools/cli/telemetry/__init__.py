"""`twofold telemetry`: summarises, exports, checks, prunes and upgrades a telemetry database."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Final

from twofold.api.errors import ConfigError

DATABASE_HERE: Final = "twofold.db"
"""Database that `make run` writes in the repository."""

ACTIONS: Final = {
    "summary": "print hit rate, uploads per token, bytes over PCIe and decode tokens/s of the last run",
    "runs": "list the runs of the database",
    "export": "write a run as a Perfetto trace, Parquet files or CSV files",
    "check": "check the database: integrity, schema version, missing steps, lost events, sizes",
    "prune": "delete old runs",
    "upgrade": "upgrade a database of an older Twofold, after a copy beside it",
}
"""Summary of each action. Its module here has add_arguments(parser) and run(args, url) -> exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `twofold telemetry`."""
    actions = parser.add_subparsers(dest="telemetry_action", required=True, metavar="ACTION")
    for name, summary in ACTIONS.items():
        action = actions.add_parser(
            name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}.", allow_abbrev=False
        )
        action.add_argument(
            "--telemetry-url",
            default=os.environ.get("TWOFOLD_TELEMETRY_URL", ""),
            metavar="URL",
            help=f"database to use (default: TWOFOLD_TELEMETRY_URL, else {DATABASE_HERE} in this folder)",
        )
        importlib.import_module(f"{__name__}.{name}").add_arguments(action)


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
    return int(importlib.import_module(f"{__name__}.{args.telemetry_action}").run(args, url))
