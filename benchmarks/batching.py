"""Decode step time by part at 1 and at 16 streams: the engine's own readings, medians over steps in which every stream
got one token; and tokens per second of the same steps without telemetry.

    python -m benchmarks.batching [--model MODEL] [--streams 1,16] [--rounds 5] [--steps 100] [--write-docs]

The bundled model unless another is named, answers by its own sampling and greedy ones. Numbers of streams are measured
in turn; a ratio is the median over rounds of rates of the same round. Over HTTP: `python -m benchmarks.serving`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from twofold.api.config import EngineConfig
from twofold.api.types import GenerationRequest, SamplingParams, StepParts, StepRecord
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.telemetry.sink import TelemetrySink

from benchmarks.peers import machine
from benchmarks.peers.report import NOTEBOOK, machine_line, write_section

PROGRAM: Final = "benchmarks.batching"
SECTION, MAKER = "batching", f"python -m {PROGRAM} --write-docs"
PROMPT_TOKENS: Final = 16
WARM_STEPS: Final = 4
SAMPLINGS: Final = {
    "sampled": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "greedy": {"temperature": 0.0},
}


class StepList(TelemetrySink):
    """Keeps the records of steps, and nothing else."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)


class Bench:
    """Two engines on one model: one that is timed alone, one that says where its time goes."""

    def __init__(self, model: str, most: int, steps: int) -> None:
        length = PROMPT_TOKENS * (most + 1) + WARM_STEPS + steps + 16
        config = EngineConfig(
            model=model,
            accelerator="none",
            max_num_seqs=most,
            max_model_len=length,
            max_total_tokens=most * (length + 16),
            enable_prefix_caching=False,
            seed=0,
        )
        self.num_steps = steps
        self.sink = StepList()
        self.plain = Engine.load(config)
        self.told = Engine.load(config, telemetry=self.sink)

    def decode_s(self, engine: Engine, streams: int, sampling: str) -> float:
        """Seconds of the steps, each of which gives all streams one token."""
        draw = random.Random(0)  # noqa: S311
        counts = [0] * streams
        params = SamplingParams(
            **SAMPLINGS[sampling], max_tokens=engine.max_context - PROMPT_TOKENS, ignore_eos=True
        )
        for index in range(streams):

            def on_chunk(chunk: Any, index: int = index) -> None:
                counts[index] += len(chunk.token_ids)

            prompt = tuple(draw.randrange(engine.vocab_size) for _ in range(PROMPT_TOKENS))
            engine.submit(GenerationRequest(prompt, params, on_chunk, str(index)))
        while not all(counts):
            engine.step()
        for _ in range(WARM_STEPS):
            engine.step()
        self.sink.steps.clear()
        begun, first = time.perf_counter(), engine.stats().num_steps
        for _ in range(self.num_steps):
            engine.step()
        seconds = time.perf_counter() - begun
        stats = engine.stats()
        if stats.num_running != streams or stats.num_steps - first != self.num_steps:
            raise RuntimeError(f"not all {streams} streams took part in every step: {stats}")
        for index in range(streams):
            engine.cancel(str(index))
        engine.step()
        return seconds

    def parts(self, streams: int, sampling: str) -> dict[str, float]:
        """Microseconds of a step by part; "python" is what no part has."""
        self.decode_s(self.told, streams, sampling)
        records = [step for step in self.sink.steps if step.num_decode_tokens == streams]
        found = [step.parts for step in records if step.parts is not None]
        parts = {name: statistics.median(getattr(each, name) for each in found) for name in StepParts._fields}
        parts = {name.removesuffix("_us"): us for name, us in parts.items() if us > 0}
        parts["between"] = statistics.median(step.wall_us - sum(step.parts or ()) for step in records)
        return parts


def measure(model: str, streams: Sequence[int], rounds: int, steps: int) -> dict[str, Any]:
    """Rates by round and the medians of the parts, by sampling and number of streams."""
    bench = Bench(model, max(streams), steps)
    rates: dict[str, dict[int, list[float]]] = {s: {n: [] for n in streams} for s in SAMPLINGS}
    parts: dict[str, dict[int, list[dict[str, float]]]] = {s: {n: [] for n in streams} for s in SAMPLINGS}
    for turn in range(rounds + 1):
        for sampling in SAMPLINGS:
            for n in streams:
                rate = n * steps / bench.decode_s(bench.plain, n, sampling)
                split = bench.parts(n, sampling)
                if turn:  # the first warms up
                    rates[sampling][n].append(rate)
                    parts[sampling][n].append(split)
    bench.plain.close()
    bench.told.close()
    medians = {
        sampling: {
            n: {name: statistics.median(each.get(name, 0.0) for each in many) for name in many[0]}
            for n, many in of.items()
        }
        for sampling, of in parts.items()
    }
    return {"rates": rates, "parts": medians}


def table(found: dict[str, Any], streams: Sequence[int]) -> str:
    """Rates, their ratios, and a row for each part of a step."""
    columns = [(sampling, n) for sampling in SAMPLINGS for n in streams]
    head = [f"{n}, {sampling}" for sampling, n in columns]
    lines = ["| streams | " + " | ".join(head) + " |", "|---" * (len(columns) + 1) + "|"]
    rates = found["rates"]
    cells = [f"{statistics.median(rates[sampling][n]):,.0f}" for sampling, n in columns]
    lines.append("| tokens/s, without telemetry | " + " | ".join(cells) + " |")
    ratios = []
    for sampling, n in columns:
        pairs = zip(rates[sampling][n], rates[sampling][streams[0]], strict=True)
        ratios.append(f"{statistics.median(a / b for a, b in pairs):.2f}×")
    lines.append(f"| times those of {streams[0]} | " + " | ".join(ratios) + " |")
    parts = found["parts"]
    names = dict.fromkeys(name for sampling, n in columns for name in parts[sampling][n])
    for name in [*names, "all"]:
        cells = []
        for sampling, n in columns:
            of = parts[sampling][n]
            whole = sum(of.values())
            us = whole if name == "all" else of.get(name, 0.0)
            cells.append(f"{us:,.0f} ({us / whole:.0%})")
        lines.append(f"| {name}, µs | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round's figures")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table into {NOTEBOOK.name}")
    args = parser.parse_args()
    about = machine.describe()
    streams = [int(n) for n in args.streams.split(",")]
    found = measure(args.model or str(bundled_model_path()), streams, args.rounds, args.steps)
    rows = table(found, streams)
    print(rows)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if args.write_docs:
        line = machine_line(
            {"date": machine.today(), "machine": about, "command": machine.command_line(PROGRAM)}
        )
        write_section(NOTEBOOK, SECTION, MAKER, f"{line}\n\n{rows}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
