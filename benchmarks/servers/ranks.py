"""Speed of one process and of two ranks on the same cores.

    python -m benchmarks ranks                    # a random model of Qwen3-30B's shape, 4 layers, 32 experts
    python -m benchmarks ranks --model MODEL

Servers run one at a time, each on its own cores: one process on one core, two ranks on one core each, one process on
both. With more cores the halves grow. Tokens per second are of greedy decode by one client, the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from twofold.tools.loadgen.generator import LoadPlan
from twofold.tools.loadgen.workload import PromptShape

from benchmarks.models.gguf_model import write_model
from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.scenario import ROOT, Report, Scenario, common, positive
from benchmarks.servers.processes import figures, send, serving

_SHAPE: Final = PromptShape(input_len=64, output_len=33)
_FLAGS: Final = ("--accelerator", "none", "--no-auto-fit", "--max-total-tokens", "1024")
_RANKS: Final = ("--tensor-parallel-size", "2")
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--rounds"),
    "--model": {"type": Path, "help": "model to serve (default: a random one, written for the run)"},
    "--layers": {"type": positive, "default": 4, "help": "layers of the random model (default: 4)"},
    "--experts": {"type": positive, "default": 32, "help": "experts of its layers (default: 32)"},
    "--flags": {"default": "", "help": "further flags of the ranks, with spaces between them"},
}


def speed(url: str, seed: int) -> tuple[float, float]:
    """Prompt tokens and decoded tokens per second."""
    found = figures(send(url, LoadPlan(num_prompts=1, max_concurrency=1, seed=seed), _SHAPE))
    return 1e3 * found["total_input_tokens"] / found["median_ttft_ms"], 1e3 / found["median_tpot_ms"]


def measure(args: argparse.Namespace) -> Report:
    cores = sorted(os.sched_getaffinity(0))
    half = cores[: max(1, len(cores) // 2)]
    kinds: dict[str, tuple[list[int], tuple[str, ...]]] = {
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
        for turn in range(args.rounds):
            for name, (allowed, further) in kinds.items():
                flags = [str(model), *_FLAGS, *further]
                with serving(ROOT, flags, Path(folder) / "log", allowed) as server:
                    speed(server.url, 2 * turn + 1)
                    found[name].append(speed(server.url, 2 * turn + 2))
    return {"rounds": found}


def show(report: Report) -> str:
    lines = []
    for name, rounds in report["rounds"].items():
        prompt, decode = (statistics.median(column) for column in zip(*rounds, strict=True))
        lines.append(f"{name:>24}: {prompt:8.1f} prompt tokens/s, {decode:7.2f} decoded tokens/s")
    return "\n".join(lines)


SCENARIO: Final = Scenario(measure, show, FLAGS)
