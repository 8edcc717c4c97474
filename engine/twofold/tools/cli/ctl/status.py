"""`twofold ctl status`: the model, its memory, and its speed."""

from __future__ import annotations

import argparse

from twofold.tools.cli.ctl.admin_client import AdminClient, add_server_arguments, memory_lines, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    found = AdminClient(args).get("/status")
    names = ", ".join([found["model"], *found["aliases"]])
    clock = " (of the emulated device)" if found["clock"] == "virtual" else ""
    lines = [
        f"model          {names}, {found['accelerator']}, twofold {found['version']}",
        f"state          {found['state']}, for {found['uptime_s']:.0f} s",
        f"requests       {found['running']} of {found['max_num_seqs']} run, {found['waiting']} wait",
        f"speed          {found['decode_tokens_per_s']:.1f} tokens/s in recent decode steps{clock}",
        *memory_lines(found["memory"]),
    ]
    return show(args, found, lines)
