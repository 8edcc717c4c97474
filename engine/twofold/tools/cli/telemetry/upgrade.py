"""`twofold telemetry upgrade`: upgrades an older database to this Twofold's schema version."""

from __future__ import annotations

import argparse
import logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`twofold telemetry upgrade` has no flags of its own."""


def run(args: argparse.Namespace, url: str) -> int:
    """Upgrade the database and print its progress; ConfigError if that is impossible."""
    from twofold.telemetry.stores import upgrade

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    version = upgrade(url)
    print(f"schema version {version}")
    return 0
