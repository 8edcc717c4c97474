"""Speed of one process and of two ranks on the same cores, and the time of one message between ranks.

    python -m benchmarks.ranks                    # a random model of Qwen3-30B's shape, 4 layers, 32 experts
    python -m benchmarks.ranks --model MODEL

Servers run one at a time, each on its own cores: one process on one core, two ranks on one core each, one process on
both. With more cores the halves grow. Tokens per second are of greedy decode by one client, the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from twofold.tools.loadgen import server_process

from benchmarks.peers.gguf_model import write_model
from benchmarks.peers.shapes import FULL_SHAPES

_TOKENS: Final = 32
_PROMPT: Final = list(range(100, 164))
_RANKS: Final = ("--tensor-parallel-size", "2")


@contextmanager
def serving(model: Path, cores: Sequence[int], flags: Sequence[str], log: Path) -> Iterator[str]:
    """The URL of a server that runs on `cores`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # the child inherits it
    command = [
        sys.executable,
        "-m",
        "twofold.tools.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--accelerator",
        "none",
    ]
    try:
        with server_process.serving(
            [*command, "--no-auto-fit", "--max-total-tokens", "1024", *flags], log, timeout_s=300
        ) as server:
            os.sched_setaffinity(0, before)
            yield server.url
    finally:
        os.sched_setaffinity(0, before)


def speed(url: str) -> tuple[float, float]:
    """Prompt tokens and decoded tokens per second."""

    def answer(num_tokens: int, first: int) -> float:
        # Another first token each time: no prompt is found in the prefix cache.
        body = {"prompt": [first, *_PROMPT], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
        return time.perf_counter() - began

    first = int(time.time() * 1000) % 10_000
    prompt_s = answer(1, first)
    return len(_PROMPT) / prompt_s, _TOKENS / max(answer(_TOKENS + 1, first + 1) - prompt_s, 1e-9)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="model to serve (default: a random one, written for the run)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that each server is started (default: 3)"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model (default: 4)")
    parser.add_argument("--experts", type=int, default=32, help="experts of its layers (default: 32)")
    parser.add_argument("--flags", default="", help="further flags of the ranks, with spaces between them")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    half = cores[: max(1, len(cores) // 2)]
    kinds = {
        f"one process, {len(half)} core(s)": (half, ()),
        "two ranks": (cores, (*_RANKS, *args.flags.split())),
        f"one process, {len(cores)} cores": (cores, ()),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            model = Path(folder) / "random.gguf"
            shape = replace(
                FULL_SHAPES["qwen3-30b-a3b"], layers=args.layers, experts=args.experts, vocab=32_768
            )
            write_model(model, shape, "q4_k")
        for _ in range(args.rounds):
            for name, (allowed, flags) in kinds.items():
                with serving(model, allowed, flags, Path(folder) / "log") as url:
                    speed(url)
                    found[name].append(speed(url))
    print(f"load {os.getloadavg()[0]:.1f}")
    for name, rounds in found.items():
        prompt, decode = (statistics.median(np.array(rounds)[:, column]) for column in (0, 1))
        print(f"{name:>24}: {prompt:8.1f} prompt tokens/s, {decode:7.2f} decoded tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
