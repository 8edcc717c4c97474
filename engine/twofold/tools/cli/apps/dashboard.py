"""`twofold dashboard`: the web page that shows a telemetry database."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Final, NoReturn

from twofold.tools.cli.apps.folders import app_folder, become
from twofold.tools.cli.number_options import add_options, whole

DATABASE_HERE: Final = "twofold.db"
"""Database that `make run` writes in the repository."""


def add_database_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --telemetry-url."""
    parser.add_argument(
        "--telemetry-url",
        default=os.environ.get("TWOFOLD_TELEMETRY_URL", ""),
        metavar="URL",
        help=f"{what} (default: TWOFOLD_TELEMETRY_URL, else {DATABASE_HERE} in this folder)",
    )


def database_url(args: argparse.Namespace) -> str:
    """The URL that --telemetry-url means."""
    return args.telemetry_url or f"sqlite:///{Path(DATABASE_HERE).absolute()}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_database_argument(parser, "database to show")
    add_options(parser, [("--port", "PORT", whole(1, 65_535), 8501, "port of the page")])
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )


def run(args: argparse.Namespace) -> NoReturn:
    """Become Streamlit's server. A database that does not exist yet is awaited by the page itself."""
    url = database_url(args)
    if importlib.util.find_spec("streamlit") is None:
        raise ModuleNotFoundError("streamlit is not installed", name="streamlit")
    print(f"Dashboard: http://{args.host}:{args.port} (Ctrl-C ends it)")
    become(["-m", "streamlit", "run", *streamlit_arguments(args.host, args.port), "--", url])


def streamlit_arguments(host: str, port: int) -> list[str]:
    """The script and its settings; the theme is in `.streamlit` beside the script."""
    return [
        str(app_folder("dashboard") / "app.py"),
        *("--server.address", host),
        *("--server.port", str(port)),
        *("--server.headless", "true"),
        *("--server.fileWatcherType", "none"),
        *("--browser.gatherUsageStats", "false"),
    ]
