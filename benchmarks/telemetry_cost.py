"""CPU time per answer token of a server by telemetry level, and the bytes it writes.

    python -m benchmarks.telemetry_cost [--users 1] [--tokens 300] [--rounds 8] [--accelerator emulated:rtx4090-pcie4] \
        [--checkout FOLDER]

Starts one server of the bundled model per level on 127.0.0.1. They answer the same requests in turn; the idle ones
cost almost nothing. Times are CPU time of the whole process (user and system), so that other load on the machine
matters little; each round gives one ratio to "off", and the median of the rounds is printed. `--checkout` measures the
servers of another checkout; one that has no levels is measured with "off" and "expert" alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from twofold.models.bundled import bundled_model_path
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.server_process import ServerProcess

from benchmarks.server_process import serving

HERE = Path(__file__).resolve().parents[1]
SETTLE_S = 0.6
"""After a round: the writer writes what is queued."""


def cpu_s(server: ServerProcess) -> float:
    """CPU time of the process so far, all threads."""
    times = Path(f"/proc/{server.pid}/task").glob("*/schedstat")
    return sum(int(time.read_text().split()[0]) for time in times) * 1e-9


async def answers(server: ServerProcess, users: int, tokens: int) -> None:
    """All users' answers at once, streamed."""
    client = HttpClient(server.url)

    async def one(user: int) -> None:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": f"Tell me of a fox and {user} kings."}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
            }
        ).encode()
        await client.lines("/v1/chat/completions", body, lambda line: None)

    await asyncio.gather(*(one(user) for user in range(users)))


def us_per_token(server: ServerProcess, users: int, tokens: int) -> float:
    begin_s = cpu_s(server)
    asyncio.run(answers(server, users, tokens))
    time.sleep(SETTLE_S)
    return (cpu_s(server) - begin_s) / (users * tokens) * 1e6


def event_bytes(file: Path) -> dict[str, float]:
    """Bytes of the database per token and layer, and how many token-layers it holds."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        (num_rows,) = database.execute("SELECT coalesce(sum(num_rows), 0) FROM layer_second").fetchone()
    return {"token_layers": num_rows, "bytes_per_token_layer": file.stat().st_size / max(num_rows, 1)}


def measure(args: argparse.Namespace, levels: Sequence[str], folder: Path) -> dict[str, object]:
    times: dict[str, list[float]] = {level: [] for level in levels}
    with contextlib.ExitStack() as open_servers:
        servers = {}
        for level in levels:
            flags = [str(bundled_model_path()), "--accelerator", args.accelerator, "--cpu-threads", "1"]
            if args.accelerator != "none":
                flags += ["--gpu-experts-ratio", "0.5"]
            if level != "off":
                flags += ["--telemetry-url", f"sqlite:///{folder / level}.db"]
                if args.has_levels:
                    flags += ["--telemetry", level]
            servers[level] = open_servers.enter_context(
                serving(args.checkout, flags, folder / f"{level}.log")
            )
            us_per_token(servers[level], args.users, args.tokens)
        for round_number in range(args.rounds):
            for level in levels if round_number % 2 else reversed(levels):
                times[level].append(us_per_token(servers[level], args.users, args.tokens))
    ratios = {
        level: [taken / off - 1 for taken, off in zip(times[level], times["off"], strict=True)]
        for level in levels
    }
    return {
        level: {
            "us_per_token": round(statistics.median(times[level]), 1),
            "cost": round(statistics.median(ratios[level]), 4),
            **({} if level == "off" else event_bytes(folder / f"{level}.db")),
        }
        for level in levels
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--accelerator", default="emulated:rtx4090-pcie4")
    parser.add_argument("--checkout", type=Path, default=HERE)
    args = parser.parse_args()
    config = args.checkout / "engine/twofold/api/config.py"
    args.has_levels = '"expert"' in config.read_text(encoding="utf-8")
    levels = ("off", "step", "layer", "expert") if args.has_levels else ("off", "expert")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, levels, Path(folder))
    load = round(os.getloadavg()[0], 1)
    print(
        json.dumps({"users": args.users, "accelerator": args.accelerator, "load": load, **figures}, indent=1)
    )


if __name__ == "__main__":
    main()
