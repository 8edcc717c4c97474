"""`twofold ctl sleep`: free expert slots and KV cache; weights stay in host memory."""

from __future__ import annotations

import argparse

from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, memory_lines, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    found = AdminClient(args).ask("POST", "/sleep")
    return show(args, found, [f"state          {found['state']}", *memory_lines(found["memory"])])
