"""CPU and wall time per answer token of a server by telemetry level, and the bytes it writes.

    python -m benchmarks.telemetry_cost [--users 1] [--tokens 300] [--rounds 8] [--accelerator emulated:rtx4090-pcie4] \
        [--levels off,step,layer,expert] [--shape qwen3-30b-a3b --layers 6 [--folder FOLDER]] [--checkout FOLDER]

Starts one server of the bundled model per level on 127.0.0.1. They answer the same requests in turn; the idle ones
cost almost nothing. `cost` compares CPU time of the whole process (user and system), so that other load on the machine
matters little; `wall_cost` compares times until the last answer's end and needs a quiet machine. Each round gives one
ratio to "off", and the median of the rounds is printed. `--shape` takes layers of a large model with random weights
instead of the bundled model: six layers of qwen3-30b-a3b are 2.8 GB. The servers map one packed file: with weights of
their own, two servers of one level differ by 4 % by where these lie in memory. `--folder` keeps them for the next call.
`--checkout` measures the servers of another checkout; one that has no levels is measured with "off" and "expert" alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from twofold.models.bundled import bundled_model_path
from twofold.telemetry.sink import LEVELS
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.server_process import ServerProcess

from benchmarks.peers.gguf_model import write_model
from benchmarks.peers.random_blocks import GGUF_FORMATS
from benchmarks.peers.shapes import FULL_SHAPES
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
        await client.lines("/v1/chat/completions", body, lambda line, at_s: None)

    await asyncio.gather(*(one(user) for user in range(users)))


class Taken(NamedTuple):
    """Time per token, in microseconds."""

    cpu_us: float
    wall_us: float


def taken(server: ServerProcess, users: int, tokens: int) -> Taken:
    begin_s, begin_wall_s = cpu_s(server), time.perf_counter()
    asyncio.run(answers(server, users, tokens))
    wall_s = time.perf_counter() - begin_wall_s
    time.sleep(SETTLE_S)
    return Taken(*(1e6 * each / (users * tokens) for each in (cpu_s(server) - begin_s, wall_s)))


def event_bytes(file: Path) -> dict[str, float]:
    """Bytes of the database per token and layer, and how many token-layers it holds."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        (num_rows,) = database.execute("SELECT coalesce(sum(num_rows), 0) FROM layer_second").fetchone()
    return {"token_layers": num_rows, "bytes_per_token_layer": file.stat().st_size / max(num_rows, 1)}


def model_of(args: argparse.Namespace, folder: Path) -> Path:
    """The bundled model, or a packed one of random layers."""
    if args.shape is None:
        return bundled_model_path()
    packed: Path = args.folder or folder / "packed"
    if not packed.exists():
        layers = folder / "layers.gguf"
        write_model(layers, FULL_SHAPES[args.shape].with_layers(args.layers), args.format)
        subprocess.run([sys.executable, "-m", "twofold", "pack", layers, packed], check=True)
        layers.unlink()
    return packed


def measure(args: argparse.Namespace, levels: Sequence[str], folder: Path) -> dict[str, object]:
    times: dict[str, list[Taken]] = {level: [] for level in levels}
    model = model_of(args, folder)
    with contextlib.ExitStack() as open_servers:
        servers = {}
        for level in levels:
            flags = [str(model), "--accelerator", args.accelerator, "--cpu-threads", str(args.cpu_threads)]
            if args.accelerator != "none":
                flags += ["--gpu-experts-ratio", "0.5"]
            if level != "off":
                flags += ["--telemetry-url", f"sqlite:///{folder / level}.db"]
                if args.has_levels:
                    flags += ["--telemetry", level]
            servers[level] = open_servers.enter_context(
                serving(args.checkout, flags, folder / f"{level}.log")
            )
            taken(servers[level], args.users, args.tokens)
        for round_number in range(args.rounds):
            for level in levels if round_number % 2 else reversed(levels):
                times[level].append(taken(servers[level], args.users, args.tokens))

    def cost(level: str, name: str) -> float:
        pairs = zip(times[level], times["off"], strict=True)
        return round(statistics.median(getattr(on, name) / getattr(off, name) - 1 for on, off in pairs), 4)

    return {
        level: {
            "us_per_token": round(statistics.median(each.cpu_us for each in times[level]), 1),
            "cost": cost(level, "cpu_us"),
            "wall_us_per_token": round(statistics.median(each.wall_us for each in times[level]), 1),
            "wall_cost": cost(level, "wall_us"),
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
    parser.add_argument("--cpu-threads", type=int, default=1)
    parser.add_argument("--levels", default="off,step,layer,expert", help="off and others")
    parser.add_argument("--shape", choices=list(FULL_SHAPES), help="random layers of this model")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--format", default="q4_k", choices=list(GGUF_FORMATS), help="of the random layers")
    parser.add_argument("--folder", type=Path, help="where the packed random layers are, or will be")
    parser.add_argument("--checkout", type=Path, default=HERE)
    args = parser.parse_args()
    config = args.checkout / "engine/twofold/api/config.py"
    args.has_levels = '"expert"' in config.read_text(encoding="utf-8")
    levels = args.levels.split(",") if args.has_levels else ["off", "expert"]
    if "off" not in levels or not set(levels) <= {"off", *LEVELS}:
        parser.error(f"--levels {args.levels}: expected off and any of {', '.join(LEVELS)}, with commas")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, levels, Path(folder))
    load = round(os.getloadavg()[0], 1)
    about = {
        "users": args.users,
        "model": args.shape or "bundled",
        "accelerator": args.accelerator,
        "load": load,
    }
    print(json.dumps({**about, **figures}, indent=1))


if __name__ == "__main__":
    main()
