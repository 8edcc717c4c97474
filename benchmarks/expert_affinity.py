"""What a router gains that sends a request to the replica whose slots hold its experts.

    python -m benchmarks.expert_affinity TRACE.npz [--replicas 2,4] [--slots 0.125,0.25,0.5] [--profile rtx4090-pcie4]

Requests are the sequences of a recorded trace, in its order. Each assignment gives a replica its sequences. The
engine's scheduler plays them on a virtual clock, one after the other; slots hold the most used experts at first.

- random: the mean of eight random assignments; what a router without knowledge of experts does.
- first tokens: the replica whose recent expert use is most like that of the request's first 16 tokens, which a router
  could learn from an earlier turn at best. No replica gets more than 1.1 times its share.
- whole request: the same with the use of the whole request, which no router knows.
- clustered: sequences grouped by their use (balanced k-means over all of them): no online router does better by use.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from twofold.experts.profiles import MachineProfile, load_profile
from twofold.tools.lab.shapes import ModelShape, find_shape
from twofold.tools.lab.simulate import simulate_system
from twofold.tools.lab.systems import SYSTEMS
from twofold.tools.lab.trace import Trace, load_trace, make_trace

F64 = npt.NDArray[np.float64]
FIRST_TOKENS = 16
MOST = 1.1
"""Largest load of a replica, in shares."""
FORGET = 0.9
"""What remains of a replica's expert use after each request."""


def use_of(trace: Trace, begin: int, end: int) -> F64:
    """Normalised use by expert, [layers * experts]."""
    ids = trace.ids[begin:end]
    counts = np.stack(
        [np.bincount(ids[:, layer].ravel(), minlength=trace.num_experts) for layer in range(trace.num_layers)]
    )
    flat = counts.ravel().astype(np.float64)
    return np.asarray(flat / np.linalg.norm(flat), np.float64)


def by_use(uses: Sequence[F64], lengths: Sequence[int], replicas: int) -> list[int]:
    """Online: the replica with the most similar recent use, unless it has had more than its share."""
    known = [np.zeros_like(uses[0]) for _ in range(replicas)]
    tokens, chosen = [0] * replicas, []
    for use, length in zip(uses, lengths, strict=True):
        limit = MOST * (sum(tokens) + length) / replicas
        allowed = [each for each in range(replicas) if tokens[each] + length <= max(limit, length)] or [
            int(np.argmin(tokens))
        ]
        best = max(allowed, key=lambda each: (float(known[each] @ use), -tokens[each]))
        known[best] = FORGET * known[best] + use
        tokens[best] += length
        chosen.append(best)
    return chosen


def clustered(uses: Sequence[F64], lengths: Sequence[int], replicas: int, seed: int = 0) -> list[int]:
    """Balanced k-means by cosine."""
    points, draw = np.stack(uses), np.random.default_rng(seed)
    centres = points[draw.choice(len(points), replicas, replace=False)]
    limit = MOST * sum(lengths) / replicas
    chosen = [0] * len(points)
    for _ in range(20):
        likeness = points @ centres.T
        tokens = [0] * replicas
        for index in np.argsort(-(likeness.max(axis=1) - likeness.mean(axis=1))):
            order = np.argsort(-likeness[index])
            best = next(
                (int(each) for each in order if tokens[each] + lengths[index] <= limit),
                int(np.argmin(tokens)),
            )
            tokens[best] += lengths[index]
            chosen[index] = best
        centres = np.stack([points[np.array(chosen) == each].sum(axis=0) for each in range(replicas)])
        centres /= np.linalg.norm(centres, axis=1, keepdims=True) + 1e-12
    return chosen


def played(
    trace: Trace,
    chosen: Sequence[int],
    replicas: int,
    slots: float,
    *,
    shape: ModelShape,
    profile: MachineProfile,
    prior: Sequence[float],
) -> tuple[float, float]:
    """(hit rate, tokens per second of all replicas together while each is busy)."""
    hits = active = 0
    speed = 0.0
    for replica in range(replicas):
        parts = [
            slice(int(trace.offsets[n]), int(trace.offsets[n + 1]))
            for n, each in enumerate(chosen)
            if each == replica
        ]
        if not parts:
            continue
        ids = np.concatenate([trace.ids[part] for part in parts])
        probs = None if trace.probs is None else np.concatenate([trace.probs[part] for part in parts])
        offsets = np.cumsum([0] + [part.stop - part.start for part in parts])
        own = make_trace(trace.name, ids, probs, offsets, num_experts=trace.num_experts)
        result = simulate_system(own, SYSTEMS["twofold"], shape, profile, slots=slots, prior_usage=prior)
        hits += result.num_hits
        active += result.num_hits + result.num_cpu + result.num_fetched
        speed += result.num_tokens / result.total_us * 1e6
    return hits / active, speed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--replicas", default="2,4")
    parser.add_argument("--slots", default="0.125,0.25,0.5")
    parser.add_argument("--profile", default="rtx4090-pcie4")
    parser.add_argument("--model", default=None)
    args = parser.parse_args()
    trace, profile = load_trace(args.trace), load_profile(args.profile)
    shape = find_shape(args.model, trace)
    bounds = [(int(begin), int(end)) for begin, end in zip(trace.offsets, trace.offsets[1:], strict=False)]
    lengths = [end - begin for begin, end in bounds]
    first = [use_of(trace, begin, min(end, begin + FIRST_TOKENS)) for begin, end in bounds]
    whole = [use_of(trace, begin, end) for begin, end in bounds]
    prior = trace.usage()
    print(f"{trace.name}: {len(bounds)} requests, {trace.num_tokens} tokens, {profile.name} (virtual clock)")
    for replicas in map(int, args.replicas.split(",")):
        for slots in map(float, args.slots.split(",")):

            def figures(
                chosen: Sequence[int], replicas: int = replicas, slots: float = slots
            ) -> tuple[float, float]:
                return played(trace, chosen, replicas, slots, shape=shape, profile=profile, prior=prior)

            draws = [
                figures(list(np.random.default_rng(seed).permutation(np.arange(len(bounds)) % replicas)))
                for seed in range(8)
            ]
            base = statistics.mean(speed for _, speed in draws)
            spread = statistics.stdev(speed for _, speed in draws) / base
            hits = statistics.mean(rate for rate, _ in draws)
            print(
                f"{replicas} replicas, {slots:.1%} slots: random {hits:.1%} hits, {base:.1f} tokens/s (±{spread:.1%})"
            )
            for name, chosen in (
                ("first tokens", by_use(first, lengths, replicas)),
                ("whole request", by_use(whole, lengths, replicas)),
                ("clustered", clustered(whole, lengths, replicas)),
            ):
                rate, speed = figures(chosen)
                print(f"    {name:14} {rate:.1%} hits, {speed:.1f} tokens/s, {speed / base:.3f} x random")
    return 0


if __name__ == "__main__":
    sys.exit(main())
