"""`twofold ctl requests`: list running and waiting requests, or abort one."""

from __future__ import annotations

import argparse
import urllib.parse

from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, show
from twofold.tools.cli.terminal_text import table

_COLUMNS = {
    "id": "id", "state": "state", "endpoint": "endpoint", "prompt_tokens": "prompt", "cached_tokens": "cached",
    "computed_tokens": "computed", "generated_tokens": "generated", "max_tokens": "of", "age_s": "age s",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cancel", metavar="ID", help="cancel the request with this id; its client gets an error"
    )
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    client = AdminClient(args)
    if args.cancel is not None:
        cancelled = client.ask("DELETE", f"/requests/{urllib.parse.quote(args.cancel, safe='')}")
        return show(args, cancelled, [f"cancelled {cancelled['cancelled']}"])
    found = client.get("/requests")
    rows = [[request[name] for name in _COLUMNS] for request in found["requests"]]
    left_out = found["num_requests"] - len(rows)
    lines = table(list(_COLUMNS.values()), rows) if rows else ["no request is running or waiting"]
    return show(args, found, lines + ([f"and {left_out} more"] if left_out else []))
