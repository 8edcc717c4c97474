"""Time of a step of 1 to 8 tokens of one sequence on the CPU, beside the bytes that it reads.

    python -m benchmarks.small_steps [MODEL] [--shape qwen3-30b-a3b --layers 6 --format q4_k --cache DIR]

Without a shape it takes a model, by default the bundled one. With a shape it takes a model of random weights, which it
writes under --cache. The tokens of a step alternate between --distinct tokens, so that they share experts as the tokens
of a text do; `shared` is the measured share of the routed experts that a step does not read again. `÷ its bytes` is
time ÷ (bytes read ÷ bandwidth of one token), and 1 is a step that costs no more than the bytes it reads. Step sizes
take turns; the table shows lower quartiles. With --cpu-threads 1 times are CPU time, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from twofold.api.config import EngineConfig
from twofold.blocks import ops
from twofold.engine.loading import load_parts
from twofold.step.model import BatchMeta
from twofold.step.runner import ModelRunner

from benchmarks.peers.gguf_model import cached_model
from benchmarks.peers.shapes import FULL_SHAPES

OPERATORS: Final = {
    "dense": ("qkv", "keys_values", "output", "dense_ffn"),
    "attention": ("attention",),
    "router": ("router",),
    "experts": ("experts",),
    "head": ("head",),
}
"""Kinds of native work (`ops.work_times`) by column of the table."""


@dataclass
class Steps:
    """Measured steps of one size."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    by_operator: list[dict[str, float]] = field(default_factory=list)
    num_runs: list[int] = field(default_factory=list)
    """Experts read, all layers."""

    def typical_s(self, threads: int) -> float:
        return quartile(self.cpu_s if threads == 1 else self.seconds)


def quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


class SmallSteps:
    """A model on the CPU with one sequence of `context` tokens, whose next tokens are computed again and again."""

    def __init__(self, model: str, threads: int, context: int, distinct: int) -> None:
        config = EngineConfig(
            model=model, accelerator="none", cpu_threads=threads, enable_prefix_caching=False, max_num_seqs=1
        )
        parts = load_parts(config)
        runner = parts.loaded.runner
        assert isinstance(runner, ModelRunner)
        self.moe = runner.moe
        self.threads = runner.pool.num_threads
        self._model, self._cache = runner._model, runner._kv_cache
        self._context = context
        self._pages = np.arange(-(-(context + 8) // config.page_size), dtype=np.int32)[None]
        draw = np.random.default_rng(1)
        self._prompt = draw.integers(1, runner.vocab_size, context).astype(np.int32)
        self._next = draw.integers(1, runner.vocab_size, distinct).astype(np.int32)
        self.run(self._prompt, 0)
        self.dense_bytes, self.expert_bytes = self._bytes()

    def run(self, tokens: np.ndarray, position: int) -> None:
        positions = np.arange(position, position + len(tokens), dtype=np.int32)
        index = np.zeros(len(tokens), np.int32)
        records = np.zeros(1, np.int32)
        prompt = np.array([self._context], np.int32)
        batch = self._model.attention_batch(BatchMeta(positions, index, self._pages, prompt, records=records))
        self.moe.begin_step(0, [0] * len(tokens), positions.tolist(), [True] * len(tokens))
        hidden = self._model.forward(tokens, batch, self._cache, self.moe.executor)
        self._model.logits(hidden if position else hidden[-1:])
        self.moe.end_step()

    def measure(self, num_tokens: int, into: Steps) -> None:
        tokens = np.array(list(itertools.islice(itertools.cycle(self._next), num_tokens)), np.int32)
        before, runs = ops.work_times(), self.moe.num_expert_runs
        cpu_s, began = time.process_time(), time.perf_counter()
        self.run(tokens, self._context)
        into.seconds.append(time.perf_counter() - began)
        into.cpu_s.append(time.process_time() - cpu_s)
        after = ops.work_times()
        into.by_operator.append(
            {name: sum(after[kind] - before[kind] for kind in kinds) for name, kinds in OPERATORS.items()}
        )
        into.num_runs.append(self.moe.num_expert_runs - runs)

    def _bytes(self) -> tuple[float, float]:
        """Bytes that a step reads whatever its routing, and bytes of one expert."""
        files = self._model.files
        dense = 0.0
        for block, weights in files.blocks():
            if block.kind not in ("experts", "embedding"):
                dense += block.cost(weights, 1, self._context).num_bytes
        dense += files.config.head.cost(files.head).num_bytes
        return dense, float(self.moe.expert_bytes)


def alternating(steps: SmallSteps, sizes: list[int], rounds: int) -> dict[int, Steps]:
    """Steps of all sizes, which take turns; the first round is not kept."""
    found = {size: Steps() for size in sizes}
    for round_number in range(rounds + 1):
        for size in sizes:
            steps.measure(size, found[size] if round_number else Steps())
    return found


def lines(steps: SmallSteps, found: dict[int, Steps]) -> Iterator[str]:
    """The table, a line per step size."""
    columns = list(OPERATORS)
    yield "| tokens | ms | ÷ one token | shared | ÷ its bytes | " + " | ".join(columns) + " |"
    yield "|" + "---|" * (5 + len(columns))
    shape = steps.moe.shape
    one_runs = shape.num_layers * shape.top_k
    one = found[1]
    for size, of_size in found.items():
        runs = statistics.median(of_size.num_runs)
        shared = 1 - (runs - one_runs) / max((size - 1) * one_runs, 1) if size > 1 else 0.0
        read = steps.dense_bytes + runs * steps.expert_bytes
        bytes_ratio = read / (steps.dense_bytes + one_runs * steps.expert_bytes)
        taken = of_size.typical_s(steps.threads)
        ratio = taken / one.typical_s(steps.threads)
        parts = [
            quartile(part[name] for part in of_size.by_operator)
            / max(quartile(part[name] for part in one.by_operator), 1e-9)
            for name in columns
        ]
        yield (
            f"| {size} | {1e3 * taken:.3f} | {ratio:.2f} | {shared:.0%} | {ratio / bytes_ratio:.2f} | "
            + " | ".join(f"{part:.2f}" for part in parts)
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument(
        "--shape", choices=FULL_SHAPES, help="random weights of this shape instead of a model"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--format", default="q4_k", help="of the random weights")
    parser.add_argument("--cache", type=Path, default=Path.home() / "twofold-peers", help="for random models")
    parser.add_argument("--cpu-threads", type=int, default=0)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--distinct", type=int, default=2, help="different tokens of a step")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    if 1 not in args.tokens or max(args.tokens) > 8:
        parser.error(f"--tokens: {args.tokens} was given; expected 1 and numbers of 2 to 8")
    model = args.model
    if args.shape is not None:
        shape = FULL_SHAPES[args.shape].with_layers(args.layers)
        model = str(cached_model(args.cache, shape, args.format))
    steps = SmallSteps(model, args.cpu_threads, args.context, args.distinct)
    found = alternating(steps, sorted(args.tokens), args.rounds)
    one = found[1]
    runs = statistics.median(one.num_runs)
    rate = (steps.dense_bytes + runs * steps.expert_bytes) / one.typical_s(steps.threads) / 1e9
    print(
        f"{model or 'bundled model'}, {ops.isa_choice()[0]}, context {args.context}, one token reads {rate:.1f} GB/s; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs. Operators: time as a multiple of one token's."
    )
    for line in lines(steps, found):
        print(line)


if __name__ == "__main__":
    main()
