"""Targets measured on one MoE layer: shares of what the machine can do, batches of a few tokens, and kt-kernel."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.peers import ceilings
from benchmarks.peers.engines import PeerError
from benchmarks.peers.layers import LayerSpec, Timing, running, take_turns
from benchmarks.targets.lines import Line, Settings, at_least, at_most, not_measured

_WORKER: Final = "layer_worker.py"
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
_TOKENS_PER_EXPERT: Final = 32
_TURNS: Final = 7
_READ: Final = "read_gb_per_s"


def shares_of_the_ceilings(settings: Settings) -> list[Line]:
    """One layer on all threads: bytes read by a decoded token, and products at 32 tokens per expert.

    What bounds the products is the lower one of arithmetic and of reading every weight once; with AMX that is memory.

    The ceilings are measured before and after each turn, and the higher one bounds that turn: what memory gives on a
    shared machine changes by half within minutes. The median turn counts.
    """
    shape = settings.shape
    tokens = shape.experts * _TOKENS_PER_EXPERT // shape.top_k
    specs = [LayerSpec(_WORKER, name, settings.python) for name in settings.formats]
    lines = []
    turns: list[dict[tuple[str, int], Timing]] = []
    try:
        found = [ceilings.measure(settings.threads, settings.python)]
        with running(specs, shape, settings.threads, tokens, settings.seed) as (processes, missing):
            ready = {process.spec.way: process.ready for process in processes}
            for _ in range(_TURNS):
                one = take_turns(processes, [(1, 40)], 1, missing)
                many = take_turns(processes, [(tokens, 2)], 1, missing, balanced=True)
                turns.append(one | many)
                found.append(ceilings.measure(settings.threads, settings.python))
    except PeerError as error:
        return [not_measured("kernels", "shares of the ceilings", str(error))]
    highest = [
        {name: max(before[name], after[name]) for name in before}
        for before, after in itertools.pairwise(found)
    ]

    def share(
        spec: LayerSpec, num_tokens: int, work: float, most: list[float], unit: str
    ) -> tuple[float, str]:
        """Per cent of what each turn allowed at most, in the median turn, and that turn in words."""
        rates = [work / statistics.median(turn[spec.name, num_tokens].seconds) / 1e9 for turn in turns]
        shares = [rate / highest_rate for rate, highest_rate in zip(rates, most, strict=True)]
        middle = sorted(range(len(shares)), key=shares.__getitem__)[len(shares) // 2]
        return 100 * shares[middle], (
            f"{rates[middle]:.0f} of {most[middle]:.0f} {unit}, a whole layer, median of {len(shares)} "
            f"turns ({100 * min(shares):.0f}-{100 * max(shares):.0f} %)"
        )

    for spec in specs:
        if not all({(spec.name, 1), (spec.name, tokens)} <= turn.keys() for turn in turns):
            lines.append(not_measured("kernels", f"layer in {spec.way}", missing.get(spec.name, "no answer")))
            continue
        expert_bytes = float(ready[spec.way]["bytes"])
        figure, note = share(spec, 1, shape.top_k * expert_bytes, [turn[_READ] for turn in highest], "GB/s")
        what = f"read by decode of a layer in {spec.way}"
        lines.append(at_least("kernels", what, 90, figure, "% of the ceiling", note))
        peaks = [ceilings.arithmetic(turn, spec.way) for turn in highest]
        from_memory = [
            turn[_READ] / expert_bytes * 2 * _TOKENS_PER_EXPERT * shape.expert_weights for turn in highest
        ]
        most = [min(peak, read) for peak, read in zip(peaks, from_memory, strict=True) if peak is not None]
        if len(most) < len(turns):
            continue
        figure, note = share(spec, tokens, 2.0 * tokens * shape.top_k * shape.expert_weights, most, "Gop/s")
        what = f"products at {_TOKENS_PER_EXPERT} tokens per expert in {spec.way}"
        lines.append(at_least("kernels", what, 60, figure, "% of the ceiling", note))
    return lines


def small_batches(settings: Settings) -> list[Line]:
    """2 to 64 tokens through one layer, over (experts touched ÷ top-k) × the time of one token: the worst of them."""
    specs = [LayerSpec(_WORKER, name, settings.python) for name in settings.formats]
    lines = []
    for threads in dict.fromkeys((1, settings.threads)):
        target = (
            f"2 to 64 tokens ÷ (experts touched × one token ÷ top-k), {threads} thread{'s' * (threads > 1)}"
        )
        try:
            with running(specs, settings.shape, threads, max(_BATCHES), settings.seed) as (
                processes,
                missing,
            ):
                cases = [(tokens, max(2, 24 // tokens)) for tokens in _BATCHES]
                timings = take_turns(processes, cases, 2 * _TURNS, missing)
        except PeerError as error:
            lines.append(not_measured("batches", target, str(error)))
            continue
        for spec in specs:
            mine = [timings[spec.name, tokens] for tokens in _BATCHES if (spec.name, tokens) in timings]
            if spec.name in missing or len(mine) < len(_BATCHES):
                lines.append(
                    not_measured("batches", f"{target}, {spec.way}", missing.get(spec.name, "no answer"))
                )
                continue
            factors = amortisation(mine, settings.shape.top_k)
            worst = max(factors, key=lambda tokens: factors[tokens])
            note = "tokens: factor " + ", ".join(
                f"{tokens}: {factor:.2f}" for tokens, factor in factors.items()
            )
            lines.append(at_most("batches", f"{target}, {spec.way}", 1.25, factors[worst], "×", note))
    return lines


def amortisation(timings: Sequence[Timing], top_k: int) -> dict[int, float]:
    """tokens -> median time ÷ (mean experts touched ÷ top-k × median time of one token). The first is of one token."""
    one = statistics.median(timings[0].seconds)
    return {
        timing.tokens: statistics.median(timing.seconds) / (one * statistics.mean(timing.touched) / top_k)
        for timing in timings[1:]
    }
