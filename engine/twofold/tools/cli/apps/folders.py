"""Starts the programs beside the package: the dashboard and the load test.

They have interpreters of their own. Streamlit runs scripts, and Locust replaces parts of the standard library.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from twofold.api.errors import ConfigError


def app_folder(name: str) -> Path:
    """The folder of `dashboard` or `loadtest`: in the installed package or, in a source tree, at its top.

    Raises:
        ConfigError: neither has it.
    """
    package = Path(__file__).resolve().parents[3]
    places = (package / "apps" / name, package.parents[1] / name)
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"{name} is in neither {places[0]} nor {places[1]}; install Twofold again")


def become(arguments: list[str]) -> NoReturn:
    """Replace this process by `python ARGUMENTS`, so that signals and the exit code are the program's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606  no shell
