"""Decode of several sequences at once, Twofold and llama.cpp in turn, as llama-batched-bench has it.

    python -m benchmarks.peers.batched MODEL.gguf [--batches 1,4,16,64] [--rounds 3] [--llama-python PATH]

Every sequence has a prompt of its own; then --new-tokens steps give each of them one token. Twofold is charged for
picking them, llama.cpp is given random ones. A turn is a fresh process for each engine; tables show medians over turns.
A random model is made by `python -m benchmarks.peers` (--cache). Stop other work before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import machine
from benchmarks.peers.engines import PeerError, last_json_lines
from benchmarks.peers.report import machine_line

PROGRAM: Final = "benchmarks.peers.batched"
_WORKERS: Final = Path(__file__).resolve().parent / "workers"
_INSTALL: Final = {
    "twofold": "install it: make build",
    "llama.cpp": "install it: pip install 'twofold[peers]', or name an interpreter that has it: --llama-python PATH",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--batches", default="1,4,16,64", help="numbers of sequences (default: 1,4,16,64)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each sequence (default: 32)")
    parser.add_argument("--new-tokens", type=int, default=32, help="steps that are timed (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=machine.physical_cores(), help="default: physical cores"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-unified", action="store_true", help="one KV buffer for llama.cpp's sequences")
    parser.add_argument("--twofold-python", default=sys.executable, metavar="PATH")
    parser.add_argument(
        "--llama-python", default=sys.executable, metavar="PATH", help="interpreter with llama-cpp-python"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    try:
        args.batches = [int(part) for part in args.batches.split(",")]
    except ValueError:
        parser.error(f"--batches was given {args.batches!r}; it takes numbers separated by commas")
    if min(*args.batches, args.prompt_tokens, args.new_tokens, args.rounds, args.threads) < 1:
        parser.error("--batches, --prompt-tokens, --new-tokens, --rounds and --threads take 1 or more")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """tokens/s of every turn by engine and number of sequences. PeerError if an engine cannot be measured."""
    task = {
        name: getattr(args, name) for name in ("batches", "prompt_tokens", "new_tokens", "threads", "seed")
    }
    task |= {"model": str(args.model), "kv_unified": args.kv_unified}
    commands = {
        "twofold": [args.twofold_python, str(_WORKERS / "batched_worker.py"), json.dumps(task)],
        "llama.cpp": [args.llama_python, str(_WORKERS / "batched_llama_worker.py"), json.dumps(task)],
    }
    rates: dict[str, dict[int, list[float]]] = {
        engine: {batch: [] for batch in args.batches} for engine in commands
    }
    for turn in range(args.rounds):
        for engine, command in commands.items():
            for line in last_json_lines(command, f"{engine} on {args.model.name}", _INSTALL[engine]):
                if isinstance(line, dict) and "decode_s" in line:
                    rates[engine][line["batch"]].append(line["batch"] * args.new_tokens / line["decode_s"])
            if not all(len(samples) == turn + 1 for samples in rates[engine].values()):
                raise PeerError(f"{engine} on {args.model.name} did not measure every number of sequences")
            latest = ", ".join(f"{batch}: {samples[-1]:.1f}" for batch, samples in rates[engine].items())
            print(f"turn {turn + 1}/{args.rounds} {engine} {latest} tokens/s", file=sys.stderr, flush=True)
    return {
        "date": machine.today(),
        "command": machine.command_line(PROGRAM),
        "machine": machine.describe(),
        "tokens_per_s": rates,
    }


def markdown(report: dict[str, Any]) -> str:
    ours, theirs = report["tokens_per_s"].values()
    lines = [
        machine_line(report),
        "",
        "| sequences | twofold | llama.cpp | twofold ÷ llama.cpp |",
        "|---|---|---|---|",
    ]
    for batch in ours:
        mine, other = statistics.median(ours[batch]), statistics.median(theirs[batch])
        lines.append(f"| {batch} | {mine:.1f} | {other:.1f} | {mine / other:.2f}× |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        report = measure(args)
    except PeerError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1) if args.json else markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
