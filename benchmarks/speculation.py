"""Speculative decoding against none, on one model: edits, prose, an oracle and a drafter that is always wrong.

    python -m benchmarks.speculation [MODEL] [--accelerator emulated:rtx4090-pcie4] [--cpu-threads 1] [--mtp]
    python -m benchmarks.speculation --shape qwen3-30b-a3b --layers 6 --format q4_k --only edit

Two engines answer in turn, one with --speculative-config, and their answers are compared bit for bit. On a wall clock
the ratios are medians of decode wall time and of this process's CPU time after the first token, which other load
disturbs less. On an emulated accelerator they are of its virtual clock. The tokens of an edit's answer are forced,
because the bundled model cannot edit: they are the given text with one word of twenty replaced. The model computes them
as any others. With --shape the model has random weights, the prompts are the bundled model's tokens, and one engine
answers in turn with drafts and without, so that the weights are in memory once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from twofold.api.config import EngineConfig
from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams, SpeculationCounts, Usage
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.step.draft_price import Acceptance
from twofold.step.drafters.drafter import Drafter
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import Sequence as EngineSequence

from benchmarks.peers.gguf_model import cached_model
from benchmarks.peers.shapes import FULL_SHAPES

_TALE: Final = Path(__file__).parents[1] / "engine/twofold/quantise/tale.txt"


@dataclasses.dataclass(frozen=True)
class Task:
    """One request and the drafter that proposes for it; None: n-gram lookup."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    forced: tuple[int, ...] = ()
    """The answer, whatever the model would pick; empty: the model picks."""
    wrong: float | None = None
    """Share of wrong tokens of a drafter that knows the answer."""


@dataclasses.dataclass(frozen=True)
class Measured:
    tokens: tuple[int, ...]
    usage: Usage
    cpu_s: float
    """CPU time of this process after the first token."""


class KnownAnswer(Drafter):
    """A drafter that proposes the answer itself, with a share of its tokens wrong."""

    def __init__(self, answer: Sequence[int], wrong: float) -> None:
        self._answer, self._wrong, self._random = answer, wrong, random.Random(1)  # noqa: S311

    def propose(self, sequence: EngineSequence, depth: int) -> Draft:
        right = self._answer[sequence.num_generated :][:depth]
        tokens = tuple(token ^ (self._random.random() < self._wrong) for token in right)
        return Draft(tokens, (0.9,) * len(tokens)) if tokens else NOTHING


class Forced:
    """A constraint, and its matcher, that admit one answer only."""

    error = None
    masks_first = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at = tokens, 0

    def start(self, masks_first: bool = True) -> Forced:
        return Forced(self._tokens)

    @property
    def ended(self) -> bool:
        return self._at == len(self._tokens)

    @property
    def forced(self) -> int | None:
        return None if self.ended else self._tokens[self._at]

    def take(self, token: int) -> None:
        self._at += 1

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.empty(0, np.uint32)  # never read: forced tokens need no mask

    def admits(self, token: int) -> bool:
        return True

    def prepare(self) -> None: ...
    def fail(self, reason: str) -> None:
        raise ValueError(reason)


def answer(engine: Engine, task: Task) -> Measured:
    chunks: list[Chunk] = []
    constraint = Forced(task.forced) if task.forced else None
    engine.submit(
        GenerationRequest(task.prompt, task.sampling, chunks.append, "benchmark", constraint=constraint)
    )
    while not chunks and engine.step():
        pass
    began = time.process_time()
    while engine.step():
        pass
    cpu_s = time.process_time() - began
    usage = chunks[-1].usage
    assert usage is not None, chunks[-1].error
    return Measured(tuple(token for chunk in chunks for token in chunk.token_ids), usage, cpu_s)


def compare(
    off: Engine, on: Engine, tasks: Sequence[Task], config: SpeculativeConfig, rounds: int
) -> dict[str, Any]:
    """Speed of all tasks with drafts over without, by wall or virtual time and by CPU time: medians of the rounds.

    The same engine for both pauses its drafts in turn."""
    speculator = on._speculator
    assert speculator is not None, "an engine that cannot verify drafts"
    speculator._config = config
    speculator._acceptance, speculator._drafters = Acceptance(), {}  # nothing is known from another task
    before = speculator.counts or SpeculationCounts()
    by_clock, by_cpu = [], []
    for _ in range(rounds):
        clock_s, cpu_s = [0.0, 0.0], [0.0, 0.0]
        for task in tasks:
            speculator.is_paused = off is on
            plain = answer(off, task)
            speculator.is_paused = False
            if task.wrong is not None:
                speculator._drafters = {"ngram": KnownAnswer(plain.tokens, task.wrong)}
            drafted = answer(on, task)
            assert drafted.tokens == plain.tokens, "an answer depends on its drafts"
            for at, measured in enumerate((plain, drafted)):
                clock_s[at] += measured.usage.decode_s
                cpu_s[at] += measured.cpu_s
        by_clock.append(clock_s[0] / clock_s[1])
        by_cpu.append(cpu_s[0] / cpu_s[1])
    after = speculator.counts or SpeculationCounts()
    num_drafted = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        "speed": statistics.median(by_clock),
        "range": [min(by_clock), max(by_clock)],
        "speed_by_cpu_time": statistics.median(by_cpu),
        "accepted": num_accepted / max(num_drafted, 1),
        "drafted_per_answer": num_drafted / (rounds * len(tasks)),
    }


def edits(encode: Callable[[str], Sequence[int]], text: str, count: int) -> list[Task]:
    """A text, then the same text with every twentieth word replaced."""
    tasks = []
    words = text.split()
    for number in range(count):
        given = words[40 * number :][:120]
        edited = ["river" if at % 20 == 7 else word for at, word in enumerate(given)]
        prompt = tuple(encode(" ".join(given) + "\n"))
        forced = tuple(encode(" ".join(edited)))
        tasks.append(Task(prompt, SamplingParams(max_tokens=len(forced)), forced))
    return tasks


def prose(encode: Callable[[str], Sequence[int]], text: str, count: int, max_tokens: int) -> list[Task]:
    """Answers sampled after the beginnings of sentences."""
    words = text.split()
    begins = [" ".join(words[at : at + 12]) for at in range(0, len(words) - 12, max(len(words) // count, 1))][
        :count
    ]
    return [
        Task(
            tuple(encode(begin)),
            SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed, ignore_eos=True),
        )
        for seed, begin in enumerate(begins)
    ]


def own_layer(off: Engine, plain: EngineConfig, tasks: Sequence[Task], depth: int, rounds: int) -> None:
    """The model's own prediction layer: speed at priced and fixed depths, and acceptance by position."""
    priced = SpeculativeConfig("mtp", num_speculative_tokens=depth)
    fixed = [SpeculativeConfig("mtp", num_speculative_tokens=each, adaptive=False) for each in (1, 2, 4)]
    for config in (priced, *fixed):
        on = Engine.load(
            dataclasses.replace(plain, speculative_config=json.dumps(dataclasses.asdict(config)))
        )
        found = compare(off, on, tasks, config, rounds)
        counts = on.stats().speculation or SpeculationCounts()
        shares = " ".join(f"{each / max(counts.num_drafts, 1):.0%}" for each in counts.accepted_by_position)
        name = "priced" if config.adaptive else f"fixed depth {config.num_speculative_tokens}"
        print(
            f"prose, mtp, {name:14} x {found['speed']:.3f}, by CPU time x {found['speed_by_cpu_time']:.3f}; "
            f"{counts.num_drafts} drafts, accepted by position {shares or 'none'}",
            flush=True,
        )
        on.close()


def _arguments() -> argparse.Namespace:
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
    parser.add_argument("--accelerator", default="none")
    parser.add_argument("--cpu-threads", type=int, default=0)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=50, help="of prose")
    parser.add_argument("--edits", type=int, default=6, help="edited texts")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--mtp", action="store_true", help="only the model's own prediction layer, on prose")
    parser.add_argument(
        "--text", type=Path, default=_TALE, help="text whose sentences the prompts begin with"
    )
    return parser.parse_args()


def _cases(
    price: SpeculativeConfig, free: list[Task], edited: list[Task]
) -> list[tuple[str, list[Task], SpeculativeConfig]]:
    """Name, tasks and drafter of each row of the table."""
    fixed = dataclasses.replace(price, adaptive=False)
    suffix = dataclasses.replace(price, method="suffix")
    known = [dataclasses.replace(task, wrong=0.0) for task in free[:8]]
    lies = [dataclasses.replace(task, wrong=1.0) for task in free]
    return [
        ("edit, n-gram", edited, price),
        ("prose, n-gram", free, price),
        ("prose, n-gram, fixed depth", free, fixed),
        ("edit, suffix", edited, suffix),
        ("prose, suffix", free, suffix),
        ("repeated answers, n-gram", free[:8], price),
        ("repeated answers, suffix", free[:8], dataclasses.replace(suffix, suffix_decoding_max_cached_requests=100)),
        ("oracle", known, price),
        *((f"oracle, fixed depth {depth}", known, dataclasses.replace(fixed, num_speculative_tokens=depth))
          for depth in (1, 2, 4, 8)),
        ("always wrong", lies, price),
        ("always wrong, fixed depth 4", lies[:8], dataclasses.replace(fixed, num_speculative_tokens=4)),
    ]  # fmt: skip


def main() -> None:
    args = _arguments()
    model = args.model
    if args.shape is not None:
        model = str(cached_model(args.cache, FULL_SHAPES[args.shape].with_layers(args.layers), args.format))
    plain = EngineConfig(
        model=model,
        accelerator=args.accelerator,
        cpu_threads=args.cpu_threads,
        enable_prefix_caching=False,
    )
    price = SpeculativeConfig("ngram", num_speculative_tokens=args.depth)
    on = Engine.load(dataclasses.replace(plain, speculative_config=json.dumps(dataclasses.asdict(price))))
    # Two engines of one small model differ by 3 % of time, by where their memory lies. An expert cache is not shared.
    off = on if args.shape or args.accelerator == "none" else Engine.load(plain)
    text = args.text.read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(bundled_model_path() / "tokenizer.json")) if args.shape else None

    def encode(part: str) -> Sequence[int]:
        if tokenizer is None:
            return off.tokenizer.encode(part)
        ids: list[int] = tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    free = prose(encode, text, args.prompts, args.new_tokens)
    if args.mtp:
        if off is not on:
            on.close()
        own_layer(off, plain, free, args.depth, args.rounds)
        off.close()
        return
    cases = _cases(price, free, edits(encode, text, args.edits))
    clock = "virtual clock of an emulated accelerator" if off.info.clock == "virtual" else "wall clock"
    print(f"{args.accelerator}, {clock}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    speeds: dict[str, dict[str, Any]] = {}
    for name, tasks, config in (case for case in cases if args.only in case[0]):
        found = speeds[name] = compare(off, on, tasks, config, args.rounds)
        low, high = found["range"]
        print(
            f"{name:28} x {found['speed']:.3f} ({low:.2f}-{high:.2f}), by CPU time x {found['speed_by_cpu_time']:.3f}; "
            f"accepted {found['accepted']:.0%} of {found['drafted_per_answer']:.1f} an answer",
            flush=True,
        )
    print_against_best(speeds)
    on.close()
    if off is not on:
        off.close()


def print_against_best(speeds: dict[str, dict[str, Any]]) -> None:
    """The priced oracle against the best of its fixed depths and none: what times of steps with drafts allow."""
    fixed = {name: found for name, found in speeds.items() if name.startswith("oracle, fixed")}
    if "oracle" not in speeds or not fixed:
        return
    for key, clock in (("speed", "clock"), ("speed_by_cpu_time", "CPU time")):
        best = max(fixed, key=lambda name: fixed[name][key])
        most = max(1.0, fixed[best][key])
        print(f"oracle by {clock}: {speeds['oracle'][key] / most:.0%} of x {most:.3f} ({best})")


if __name__ == "__main__":
    main()
