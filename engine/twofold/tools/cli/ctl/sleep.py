"""`twofold ctl sleep` frees expert slots and KV cache, `twofold ctl wake` allocates them again.

Weights stay in host memory; waiting requests resume.
"""

from __future__ import annotations

import argparse

from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, memory_lines, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    found = AdminClient(args).ask("POST", f"/{args.command.removeprefix('ctl ')}")
    return show(args, found, [f"state          {found['state']}", *memory_lines(found["memory"])])
