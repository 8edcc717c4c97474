"""`twofold report`: a run of a telemetry database as one HTML file."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import NoReturn

from twofold.tools.cli.apps.dashboard import add_database_argument, database_url
from twofold.tools.cli.apps.folders import app_folder, become


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", type=int, metavar="RUN", help="number of the run (default: the last one)"
    )
    add_database_argument(parser, "database that has the run")
    parser.add_argument(
        "--html", required=True, metavar="FILE", help="file to write; it needs no other file and no server"
    )


def run(args: argparse.Namespace) -> NoReturn:
    """Become the program that writes it."""
    if importlib.util.find_spec("plotly") is None:
        raise ModuleNotFoundError("plotly is not installed", name="plotly")
    chosen = [] if args.run is None else ["--run", str(args.run)]
    file = str(Path(args.html).expanduser())
    become([str(app_folder("dashboard") / "report.py"), database_url(args), file, *chosen])
