"""Micro-benchmark of sampling: milliseconds per token at a large vocabulary, beside sorting the row in numpy.

    python kernels/bench/sampling.py [--vocabulary 151936] [--threads 2] [--batch 1 8 64] [--turns 15]

Logits are normal with a spread of 1 (flat: thousands of tokens are likely) and of 4 (peaked). Cases take turns; "best"
is the fastest turn, "quarter" the lower quartile. TWOFOLD_ISA chooses the kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

try:
    from twofold.blocks import ops
except ImportError:  # run from a checkout whose native module was built in place
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))
    from twofold.blocks import ops

# Temperature, top-k, top-p, min-p.
CASES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "T 1": (1.0, 0, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "penalties and bias": (1.0, 0, 1.0, 0.0),
    "20 log probabilities": (1.0, 0, 1.0, 0.0),
}


def sorted_in_numpy(logits: np.ndarray, uniform: float) -> int:
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order].astype(np.float64)
    cumulative = np.cumsum(np.exp(scaled - scaled[0]))
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right")])


def rules(vocabulary: int) -> ops.TokenRules:
    """A request of 2,000 tokens with both kinds of penalties and 300 biases."""
    random = np.random.default_rng(1)
    made = ops.TokenRules(
        presence_penalty=0.5,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        bias=[(int(token), 1.0) for token in range(300)],
        prompt=random.integers(0, vocabulary, 1000).tolist(),
    )
    for token in random.integers(0, vocabulary, 1000).tolist():
        made.take(token)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    pool = ops.ThreadPool(args.threads)
    runs: dict[tuple[str, float, int], Callable[[], object]] = {}
    for spread in (1.0, 4.0):
        rows = random.standard_normal((max(args.batch), args.vocabulary), np.float32) * np.float32(spread)
        for batch in args.batch:
            for name, case in CASES.items():
                draws = np.array([(*case, u) for u in random.random(batch)])
                own = [rules(args.vocabulary) if name.startswith("pen") else None] * batch
                if name.startswith("20"):
                    ask = (rows[:batch], list(range(batch)), [0] * batch, [20] * batch)
                    runs[name, spread, batch] = lambda ask=ask: ops.log_probabilities(pool, *ask)
                else:
                    runs[name, spread, batch] = lambda given=(rows[:batch], draws, own): ops.pick_tokens(
                        pool, *given
                    )
        runs["sorted in numpy", spread, 1] = lambda row=rows[0]: sorted_in_numpy(row, 0.4)
    times: dict[tuple[str, float, int], list[float]] = {key: [] for key in runs}
    for _ in range(args.turns):
        for key, run in runs.items():
            began = time.perf_counter()
            run()
            times[key].append(1e3 * (time.perf_counter() - began) / key[2])
    print(f"{ops.isa_choice()[0]}, {args.threads} threads, {args.vocabulary} entries; ms per token")
    print(f"{'':22}{'spread':>7}{'batch':>7}{'best':>9}{'quarter':>9}")
    for (name, spread, batch), taken in times.items():
        taken.sort()
        print(f"{name:22}{spread:7.0f}{batch:7}{taken[0]:9.3f}{taken[len(taken) // 4]:9.3f}")


if __name__ == "__main__":
    main()
