"""Predicted speed of two cards together, of each alone and of a static split: the table of docs/guides/scale-out.md.

    python -m benchmarks.two_cards TRACE.npz
    python -m benchmarks.two_cards qwen3-30b-a3b        # drawn routing for a model of which there is no trace

Virtual clock: sequences of the trace's second half are played; slots begin with the most used experts of the first.
Ends with code 1 if both cards are slower than the better one alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from twofold.experts.profiles import load_profile
from twofold.tools.lab.devices import Steps, systems_of_devices
from twofold.tools.lab.shapes import SHAPES, find_shape
from twofold.tools.lab.trace import Trace, load_trace, make_trace

_STEPS: Final = {"decode": Steps(), "decode, 4 sequences": Steps(batch=4), "prompts": Steps(prompt_chunk=128)}
_PROFILES: Final = {"rtx4090": "rtx4090-pcie4", "rtx3060": "rtx3060-pcie3", "h200": "h200-pcie5"}
_COLUMNS: Final = (
    *("cards", "slots", "steps", "first alone", "second alone", "static split", "both"),
    *("both / better one", "both / static split"),
)
_PAIRS: Final[tuple[tuple[str, str, float, float], ...]] = (
    ("rtx4090", "rtx3060", 1 / 6, 1 / 12),
    ("rtx4090", "rtx3060", 1 / 3, 1 / 6),
    ("rtx4090", "rtx3060", 1 / 2, 1 / 4),
    ("rtx4090", "rtx4090", 1 / 8, 1 / 8),
    ("rtx4090", "rtx4090", 1 / 4, 1 / 4),
    ("rtx4090", "rtx4090", 1 / 2, 1 / 2),
    ("rtx3060", "rtx3060", 1 / 8, 1 / 8),
    ("rtx3060", "rtx3060", 1 / 4, 1 / 4),
    ("h200", "rtx4090", 1 / 4, 1 / 8),
    ("rtx4090", "rtx3060", 1 / 8, 3 / 8),
    ("rtx4090", "rtx3060", 1 / 2, 1 / 24),
    ("h200", "rtx3060", 1 / 2, 1 / 24),
)
"""First card, second card, and the share of all experts in the slots of each."""


def drawn_trace(name: str, num_sequences: int = 16, tokens_each: int = 128) -> Trace:
    """Drawn routing for a shape of `twofold lab`, alike in two figures to the recorded routing of gpt-oss-20b.

    There the most used quarter of a layer's experts has half of the uses, and half of a token's experts were the
    previous token's.
    """
    layers, experts, top_k = SHAPES[name].routing
    draw = np.random.default_rng(0)
    popularity = 0.5 * draw.standard_normal((layers, experts))
    ids = np.empty((num_sequences * tokens_each, layers, top_k), np.int32)
    for token in range(len(ids)):
        scores = popularity + draw.gumbel(size=popularity.shape)
        if token % tokens_each:
            rows = np.arange(layers)[:, None]
            scores[rows, ids[token - 1]] += 2.0
        ids[token] = np.argpartition(-scores, top_k, axis=1)[:, :top_k]
    offsets = np.arange(num_sequences + 1) * tokens_each
    return make_trace(name, ids, None, offsets, num_experts=experts)


@dataclass(frozen=True)
class Compared:
    """Tokens per second of one pair, playing one kind of steps."""

    both: float
    alone: tuple[float, ...]
    static: float

    @property
    def gain(self) -> float:
        return self.both / max(self.alone)


def compare(
    played: Trace,
    usage: Sequence[float],
    cards: tuple[str, str],
    shares: tuple[float, float],
    steps: Steps,
) -> Compared:
    """Play a trace; usage: uses of each expert, by which slots are filled at the start."""
    first, second = cards
    machine = load_profile(f"{_PROFILES[first]}+{_PROFILES[second]}")
    results = [
        result.num_tokens / result.total_us * 1e6
        for _, _, result in systems_of_devices(
            played,
            find_shape(None, played),
            machine,
            num_slots=round(sum(shares) * played.num_layers * played.num_experts),
            split=[share / sum(shares) for share in shares],
            steps=steps,
            prior_usage=list(usage),
        )
    ]
    both, *alone, static = results
    return Compared(both, tuple(alone), static)


def rows(trace: Trace, num_sequences: int) -> Iterator[tuple[str, Compared]]:
    """Each row of the table without its figures, and these. Plays so many sequences of the second half."""
    second_half, usage = trace.part("second"), trace.part("first").usage()
    offsets = second_half.offsets[: num_sequences + 1]
    ids = second_half.ids[: offsets[-1]]
    played = make_trace(trace.name, ids, None, offsets, num_experts=trace.num_experts)
    print(f"{len(ids)} tokens", file=sys.stderr)
    for first, second, *shares in _PAIRS:
        slots = " + ".join(f"{100 * share:.0f} %" for share in shares)
        for name, steps in _STEPS.items():
            found = compare(played, usage, (first, second), (shares[0], shares[1]), steps)
            yield f"| {first} + {second} | {slots} | {name} |", found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trace", help=f"recorded routing, such as gpt-oss-20b.npz, or a model: {', '.join(SHAPES)}"
    )
    parser.add_argument("--sequences", type=int, default=8, help="sequences to play (default: 8)")
    args = parser.parse_args()
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    gains = []
    trace = drawn_trace(args.trace) if args.trace in SHAPES else load_trace(args.trace)
    for row, found in rows(trace, args.sequences):
        speeds = (*found.alone, found.static, found.both)
        figures = " | ".join(f"{speed:.1f}" for speed in speeds)
        print(f"{row} {figures} | {found.gain:.2f} | {found.both / found.static:.2f} |", flush=True)
        gains.append(found.gain)
    if min(gains) < 1:
        print(f"both cards are slower than the better one alone: {min(gains):.4f} of it", file=sys.stderr)
    return int(min(gains) < 1)


if __name__ == "__main__":
    sys.exit(main())
