"""LoRA training of some layers of a real shape: Twofold, PEFT on transformers' experts, and Unsloth in turn.

    python -m benchmarks training --shape qwen3-30b-a3b --layers 6 --threads 2

Each turn is a fresh process that draws random weights and times micro-steps of --prompt-tokens tokens: forward,
backward and AdamW. The dense part is transformers' in bfloat16 everywhere; the vocabulary is cut to 1,024, because a
head of 152,000 rows costs as much as several layers and is the same for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.peers.engines import OURS, WORKERS, json_lines, take_turns
from benchmarks.scenario import (
    BenchmarkError,
    Report,
    Scenario,
    common,
    markdown_table,
    median_cell,
    physical_cores,
    positive,
    without_directories,
)

_FORMATS: Final = ("bf16", "q4_k")
IMPLEMENTATIONS: Final = ("grouped_mm", "batched_mm", "eager")
_SIZES: Final = ("hidden", "intermediate", "experts", "top_k", "heads", "kv_heads", "head_dim")
UNSLOTH: Final = "unsloth"
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--shape", "--layers", "--rounds", "--threads", "--prompt-tokens", "--seed"),
    "--format": {
        "action": "append",
        "help": f"of our experts; again for more (default: {' '.join(_FORMATS)})",
    },
    "--implementation": {
        "action": "append",
        "choices": IMPLEMENTATIONS,
        "help": "of transformers; again for more (default: all)",
    },
    "--unsloth-python": {"metavar": "PATH", "help": "interpreter with unsloth, to measure it too"},
    "--rank": {"type": positive, "default": 8},
    "--steps": {"type": positive, "default": 2, "help": "timed in each turn (default: 2)"},
}


def check(args: argparse.Namespace) -> None:
    args.threads = args.threads or physical_cores()


def turn(task: Mapping[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """Run one process. Raises BenchmarkError."""
    command = [python, str(WORKERS / "training_worker.py"), json.dumps(task)]
    lines = json_lines(command, f"training by {task['way']}", "install it: make dev")
    found: dict[str, Any] | None = next((line for line in lines if "seconds" in line), None)
    if found is None:
        raise BenchmarkError(f"training by {task['way']} printed no measurement")
    return found


def shown(found: Mapping[str, Any]) -> str:
    return f"{statistics.median(found['seconds']):.2f} s a step, {found['peak_bytes'] / 1e9:.1f} GB"


def measure(args: argparse.Namespace) -> Report:
    """Everything in turn. BenchmarkError if nothing could be measured."""
    sizes = {name: value for name, value in asdict(FULL_SHAPES[args.shape]).items() if name in _SIZES}
    settings = {
        "layers": args.layers,
        "tokens": args.prompt_tokens,
        "rank": args.rank,
        "threads": args.threads,
        "steps": args.steps,
        "seed": args.seed,
    }
    names = [f"{OURS} {each}" for each in args.format or _FORMATS] + (
        args.implementation or [*IMPLEMENTATIONS]
    )
    ways = {name: partial(turn, {"way": name} | sizes | settings) for name in dict.fromkeys(names)}
    if args.unsloth_python is not None:
        ways[UNSLOTH] = partial(turn, {"way": UNSLOTH} | sizes | settings, args.unsloth_python)
    rounds, left_out = take_turns(ways, args.rounds, "training", shown)
    if not rounds:
        raise BenchmarkError(f"nothing could be measured. {'; '.join(left_out.values())}")
    rows = [
        {
            "way": name,
            "tokens_per_s": [args.prompt_tokens / statistics.median(one["seconds"]) for one in of_way],
            "stored_bytes": of_way[0]["stored_bytes"],
            "peak_bytes": max(one["peak_bytes"] for one in of_way),
        }
        for name, of_way in rounds.items()
    ]
    return {"shape": args.shape} | settings | {"rounds": args.rounds, "rows": rows, "left_out": left_out}


def markdown(report: Report) -> str:
    """A row for each way, then ours beside the best of the others."""
    rows = [
        [
            row["way"],
            median_cell(row["tokens_per_s"], 1),
            f"{row['stored_bytes'] / 1e9:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        ]
        for row in report["rows"]
    ]
    speeds = {row["way"]: statistics.median(row["tokens_per_s"]) for row in report["rows"]}
    peers = {name: speed for name, speed in speeds.items() if not name.startswith(OURS)}
    lines = []
    if peers:
        best = max(peers, key=lambda name: peers[name])
        lines += [
            f"- {name} is {speed / peers[best]:.2f}× as fast as {best}."
            for name, speed in speeds.items()
            if name not in peers
        ]
    lines += [f"- Without {name}: {without_directories(why)}." for name, why in report["left_out"].items()]
    head = ["experts", "tokens/s", "weights as stored, GB", "highest memory, GB"]
    return "\n".join([markdown_table(head, rows), "", *lines])


SCENARIO: Final = Scenario(measure, markdown, FLAGS, check, markdown=markdown)
