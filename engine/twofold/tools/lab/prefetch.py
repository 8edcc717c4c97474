"""`twofold lab prefetch`: decode speed with and without prefetch, by the virtual clock of emulated machines.

First the engine with a model; then its scheduler alone with experts of Qwen3-30B-A3B's size, on synthetic routing.
Measures no GPU (docs/explanation/prefetch.md). If a placement changes any token, it raises an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, KernelError
from twofold.api.types import PlacementCounts, SamplingParams, Usage
from twofold.engine import Engine
from twofold.tools.lab.foresight import SHAPE, play_sticky
from twofold.tools.lab.replay import Row, names_list, shares_list
from twofold.tools.lab.report import Table

PROMPTS: Final = (
    "Tell me the story of the fox and the crow.",
    "Tell me a story about a witch",
    "Continue: Once upon a time there was a poor miller",
    "Tell me the story of three brothers",
)
_COLUMNS: Final = {
    "machine": "{profile}", "slots": "{slots:.0%}", "off": "{off_tokens_per_s:.2f}", "on": "{on_tokens_per_s:.2f}",
    "gain": "{gain:+.1%}", "issued": "{issued}", "used": "{used}",
}  # fmt: skip
_MORE_COLUMNS: Final = {
    "wasted": "{wasted}", "dropped": "{dropped}", "precision": "{precision:.1%}", "recall": "{recall:.1%}",
    "hit rate off": "{off_hit_rate:.1%}", "hit rate on": "{on_hit_rate:.1%}",
}  # fmt: skip
_MACHINES: Final = ("rtx4090-pcie4", "rtx3060-pcie3")


@dataclass(frozen=True)
class Answers:
    """An engine's answers to all prompts in order, and its counters."""

    tokens: list[list[int]]
    decode_tokens_per_s: float
    placement: PlacementCounts
    prefetch: Mapping[str, int]

    @property
    def hit_rate(self) -> float:
        counts = self.placement
        return counts.hits / max(1, counts.hits + counts.cpu_misses + counts.fetched)


def answer(config: EngineConfig, new_tokens: int) -> Answers:
    """Answer every prompt with this many tokens. Raises what `Engine.load` raises."""
    engine = Engine.load(config)
    answers: list[list[int]] = []
    decoded, seconds = 0, 0.0
    try:
        for number, prompt in enumerate(PROMPTS):
            tokens, usage = _answer_one(engine, prompt, number, new_tokens)
            answers.append(tokens)
            decoded += usage.completion_tokens - 1
            seconds += usage.decode_s
        stats = engine.stats()
    finally:
        engine.close()
    return Answers(answers, decoded / seconds, stats.placement, stats.prefetch)


def _answer_one(engine: Engine, prompt: str, seed: int, new_tokens: int) -> tuple[list[int], Usage]:
    text = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=new_tokens, ignore_eos=True)
    tokens: list[int] = []
    usage = engine.generate(
        engine.tokenizer.encode(text), sampling, lambda chunk: tokens.extend(chunk.token_ids)
    )
    return tokens, usage


def engine_rows(
    model: str, machines: Sequence[str], slots: Sequence[float], new_tokens: int
) -> Iterator[Row]:
    """A row per machine and share of experts in slots.

    Raises:
        KernelError: a placement changed the tokens of accelerator `none`. ConfigError: an unknown machine.
        ModelLoadError: the model cannot be used.
    """
    reference = answer(EngineConfig(model=model, accelerator="none"), new_tokens).tokens
    for machine in machines:
        for share in slots:

            def play(prefetch: Literal["off", "on"], machine: str = machine, share: float = share) -> Answers:
                config = EngineConfig(
                    model=model,
                    accelerator=f"emulated:{machine}",
                    gpu_experts_ratio=share,
                    prefetch=prefetch,
                )
                answers = answer(config, new_tokens)
                if answers.tokens != reference:
                    raise KernelError(f"{config} answered differently from accelerator none")
                return answers

            off, on = play("off"), play("on")
            counts = on.prefetch
            yield {
                "routing": "model",
                "profile": machine,
                "slots": share,
                "off_tokens_per_s": off.decode_tokens_per_s,
                "on_tokens_per_s": on.decode_tokens_per_s,
                "off_hit_rate": off.hit_rate,
                "on_hit_rate": on.hit_rate,
                "issued": counts["issued"],
                "used": counts["used"],
                "wasted": counts["wasted"],
                "dropped": counts["dropped"],
                "precision": counts["correct"] / max(1, counts["predicted"]),
                "recall": counts["foreseen"] / max(1, counts["misses"]),
                "clock": "virtual",
            }


def synthetic_rows(machines: Sequence[str], slots: Sequence[float], num_steps: int = 100) -> Iterator[Row]:
    """The same for `foresight.play_sticky`: experts whose upload takes longer than most layers."""
    for machine in machines:
        for share in slots:
            (off, _), (on, counts) = (
                play_sticky(machine, share, prefetch=prefetch, num_steps=num_steps)
                for prefetch in (False, True)
            )
            yield {
                "routing": "synthetic",
                "profile": machine,
                "slots": share,
                "off_tokens_per_s": off,
                "on_tokens_per_s": on,
                "issued": counts["issued"],
                "used": counts["used"],
                "clock": "virtual",
            }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `twofold lab prefetch`."""
    parser.add_argument("--model", default="", help="model directory (default: the bundled model)")
    parser.add_argument(
        "--profile", type=names_list, default=list(_MACHINES), metavar="NAME,…",
        help=f"emulated machines (default: {','.join(_MACHINES)})",
    )  # fmt: skip
    parser.add_argument(
        "--slots", type=shares_list, default=[0.1, 0.25, 0.5], metavar="SHARE,…",
        help="of all experts that have a slot, 0 … 1 (default: 0.1,0.25,0.5)",
    )  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=150, help="tokens of each answer (default: 150)")
    parser.add_argument("--json", action="store_true", help="print one JSON array of rows")


def run(args: argparse.Namespace) -> int:
    """Measure both; print two tables, or rows with --json."""
    if args.new_tokens < 2:
        raise ConfigError(f"--new-tokens was given {args.new_tokens}; it takes 2 or more")
    rows = list(engine_rows(args.model, args.profile, args.slots, args.new_tokens))
    synthetic = list(synthetic_rows(args.profile, args.slots))
    if args.json:
        print(json.dumps([*rows, *synthetic], indent=1))
        return 0
    print("Decode tokens/s on the virtual clock\n")
    print(_table(rows, _COLUMNS | _MORE_COLUMNS).text())
    print(f"\n{SHAPE.name}, synthetic routing\n")
    print(_table(synthetic, _COLUMNS).text())
    return 0


def _table(rows: Sequence[Row], columns: Mapping[str, str]) -> Table:
    gains = (row["on_tokens_per_s"] / row["off_tokens_per_s"] - 1 for row in rows)
    return Table.of([row | {"gain": gain} for row, gain in zip(rows, gains, strict=True)], columns)
