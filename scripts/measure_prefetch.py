#!/usr/bin/env python3
"""Decode speed on the virtual clock with and without prefetch, as Markdown tables (docs/prefetch.md).

First the engine with a model; then the engine's scheduler alone with experts of Qwen3-30B-A3B's size, on synthetic
routing. Emulated machines only: nothing here is a measurement of a GPU. Fails if any placement changes a single token.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from twofold.api.config import EngineConfig
from twofold.api.types import PlacementCounts, PrefetchCounts, SamplingParams
from twofold.engine import Engine
from twofold.lab.foresight import SHAPE, play_sticky

PROMPTS = (
    "Tell me the story of the fox and the crow.",
    "Tell me a story about a witch",
    "Continue: Once upon a time there was a poor miller",
    "Tell me the story of three brothers",
)
MACHINES = ("rtx4090-pcie4", "rtx3060-pcie3")
RATIOS = (0.1, 0.25, 0.5)


@dataclasses.dataclass(frozen=True)
class Outcome:
    tokens: list[list[int]]
    decode_tokens_per_s: float
    placement: PlacementCounts
    prefetch: PrefetchCounts

    @property
    def hit_rate(self) -> float:
        counts = self.placement
        return counts.hits / (counts.hits + counts.cpu_misses + counts.fetched)


def play(config: EngineConfig, new_tokens: int) -> Outcome:
    """Answer every prompt, one after the other."""
    engine = Engine.load(config)
    answers: list[list[int]] = []
    decoded, seconds = 0, 0.0
    for number, prompt in enumerate(PROMPTS):
        text = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        answer: list[int] = []
        sampling = SamplingParams(
            temperature=0.8, top_p=0.9, seed=number, max_tokens=new_tokens, ignore_eos=True
        )
        usage = engine.generate(
            engine.tokenizer.encode(text), sampling, lambda c, a=answer: a.extend(c.token_ids)
        )
        answers.append(answer)
        decoded += usage.completion_tokens - 1
        seconds += usage.decode_s
    stats = engine.stats()
    engine.close()
    return Outcome(answers, decoded / seconds, stats.placement, stats.prefetch)


def print_large() -> None:
    print(f"\n{SHAPE.name}, synthetic routing:\n")
    print("| machine | slots | off | on | difference | issued | used |")
    print("|---|---|---|---|---|---|---|")
    for machine in MACHINES:
        for ratio in RATIOS:
            (off, _), (on, counts) = (
                play_sticky(machine, ratio, prefetch=prefetch) for prefetch in (False, True)
            )
            print(
                f"| {machine} | {ratio:.0%} | {off:.2f} | {on:.2f} | {on / off - 1:+.1%} "
                f"| {counts.issued} | {counts.used} |"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="", help="model directory (default: the bundled model)")
    parser.add_argument("--new-tokens", type=int, default=150, help="tokens of each answer (default: 150)")
    args = parser.parse_args()
    reference = play(EngineConfig(model=args.model, accelerator="none"), args.new_tokens).tokens
    print("| machine | slots | off | on | gain | hit rate off → on | issued | used | wasted | dropped |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for machine in MACHINES:
        for ratio in RATIOS:
            outcomes = {}
            for prefetch in ("off", "on"):
                config = EngineConfig(
                    model=args.model,
                    accelerator=f"emulated:{machine}",
                    gpu_experts_ratio=ratio,
                    prefetch=prefetch,
                )
                outcomes[prefetch] = play(config, args.new_tokens)
                if outcomes[prefetch].tokens != reference:
                    print(f"{config} answered differently from accelerator none", file=sys.stderr)
                    return 1
            off, on = outcomes["off"], outcomes["on"]
            counts = on.prefetch
            print(
                f"| {machine} | {ratio:.0%} | {off.decode_tokens_per_s:.0f} | {on.decode_tokens_per_s:.0f} "
                f"| {on.decode_tokens_per_s / off.decode_tokens_per_s - 1:+.1%} "
                f"| {off.hit_rate:.1%} → {on.hit_rate:.1%} "
                f"| {counts.issued} | {counts.used} | {counts.wasted} | {counts.dropped} |"
            )
    share = (counts.correct / counts.predicted, counts.foreseen / counts.misses)
    print(f"\nprecision {share[0]:.1%}, recall on misses {share[1]:.1%} (last row)")
    print_large()
    return 0


if __name__ == "__main__":
    sys.exit(main())
