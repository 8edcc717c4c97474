"""The engine's choice of draft depth against fixed depths, at Qwen3-30B-A3B's shape on emulated machines.

    python -m benchmarks.draft_depths TRACE.npz [--tokens 2000] [--profile rtx3060-pcie3] [--json]

Recorded routing of another model is composed into layers of 128 experts: four recorded layers of 32 experts side by
side, of each token two of the four experts in each. Popularity, topics and repetition stay those of the recording. The
simulation is `twofold lab simulate --acceptance`; its times are of a virtual clock.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from twofold.experts.profiles import load_profile
from twofold.tools.lab.drafting import drafting_rows
from twofold.tools.lab.shapes import SHAPES
from twofold.tools.lab.simulate import slots_for_vram
from twofold.tools.lab.systems import SYSTEMS
from twofold.tools.lab.trace import Trace, load_trace, make_trace

MODEL: Final = "qwen3-30b-a3b-q4"
_GROUPS: Final = 4


def composed(trace: Trace, num_layers: int, num_experts: int, top_k: int) -> Trace:
    """A trace of another shape: layers are four recorded ones side by side.

    Layer n takes the recorded layers n, n + 1, … (modulo their number), and of each the most or, in later layers, the
    less weighted experts of a token.
    """
    each = top_k // _GROUPS
    if trace.num_experts * _GROUPS != num_experts or trace.top_k % each:
        raise SystemExit(
            f"{trace.name} has {trace.num_experts} experts, top {trace.top_k}; expected {num_experts // _GROUPS}, of "
            f"which a multiple of {each} are chosen"
        )
    layers = []
    for number in range(num_layers):
        begin, turn = number % trace.num_layers, number // trace.num_layers
        first = each * turn % trace.top_k
        groups = [
            trace.ids[:, (begin + group) % trace.num_layers, first : first + each] + group * trace.num_experts
            for group in range(_GROUPS)
        ]
        layers.append(np.concatenate(groups, 1))
    return make_trace(trace.name, np.stack(layers, 1), None, trace.offsets, num_experts)


def first_tokens(trace: Trace, count: int) -> Trace:
    """Whole sequences of about `count` tokens in all."""
    last = max(1, int(np.searchsorted(trace.offsets, count)))
    last = min(last, trace.num_sequences)
    end = int(trace.offsets[last])
    return make_trace(trace.name, trace.ids[:end], None, trace.offsets[: last + 1], trace.num_experts)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    recorded, shape = load_trace(args.trace), SHAPES[MODEL]
    whole = composed(recorded, *shape.routing)
    prior, played = whole.part("first").usage(), first_tokens(whole.part("second"), args.tokens)
    cards = {slots_for_vram(shape, played, gb, 1.0): gb for gb in args.vram}
    rows = []
    for acceptance in args.acceptance:
        found = drafting_rows(
            played,
            [SYSTEMS["twofold"]],
            shape,
            load_profile(args.profile),
            list(cards),
            acceptance=(acceptance,),
            depths=[1, 2, 3, 4],
            prior_usage=prior,
        )
        rows += [{**row, "vram_gb": cards[row["slots"]]} for row in found]
        print(".", end="", file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Speeds over off, one line per card and acceptance; the last column is the engine's choice over the best fixed."""
    speeds: dict[tuple[float, float], dict[str, float]] = {}
    for row in rows:
        speeds.setdefault((row["vram_gb"], row["acceptance"][0]), {})[row["drafts"]] = row["speed"]
    fixed = ["depth 1", "depth 2", "depth 3", "depth 4"]
    lines = ["| VRAM | acceptance | " + " | ".join([*fixed, "adaptive", "of the best"]) + " |"]
    lines.append("|" + "---|" * (len(fixed) + 4))
    for (vram, acceptance), of in sorted(speeds.items()):
        best = max(of["off"], *(of[name] for name in fixed))
        cells = [f"{of[name]:.2f}" for name in [*fixed, "adaptive"]]
        lines.append(f"| {vram:g} GB | {acceptance:g} | {' | '.join(cells)} | {of['adaptive'] / best:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="recorded routing of 32 experts per layer, top 4")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--profile", default="rtx4090-pcie4")
    parser.add_argument("--vram", type=float, nargs="+", default=[8.0, 12.0, 16.0, 24.0])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measured(args)
    print(json.dumps(rows, indent=1) if args.json else table(rows))


if __name__ == "__main__":
    main()
