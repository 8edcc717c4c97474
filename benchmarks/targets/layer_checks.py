"""Targets measured on one MoE layer: shares of what the machine can do, and batches of a few tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Final

from twofold.tools.cli.doctor.machine_shares import Ceilings
from twofold.weights.weight_format import packed_expert_bytes

from benchmarks.peers.engines import OURS, json_lines, take_turns
from benchmarks.peers.layer import Case, Layer, Timing, shown
from benchmarks.scenario import ROOT, BenchmarkError
from benchmarks.targets.lines import Line, Settings, Target, at_least, at_most

_CEILINGS: Final = "kernels/bench/ceilings.py"
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
_TOKENS_PER_EXPERT: Final = 32


def shares_of_the_ceilings(settings: Settings) -> list[Line]:
    """One layer on all threads: bytes read by a decoded token, and products at 32 tokens per expert.

    What bounds the products is the slower one of arithmetic and of reading every weight once; with AMX that is memory.
    """
    shape, lines = settings.shape, []
    tokens = shape.experts * _TOKENS_PER_EXPERT // shape.top_k
    layers = layers_of(settings, settings.threads)
    cases = ((1, 40, False), (tokens, 2, True))
    ways = {layer.name: partial(between_ceilings, settings, layer, cases) for layer in layers}
    rounds, left_out = take_turns(ways, settings.rounds, "kernels", lambda turn: shown(turn[1]))
    flops = 2.0 * tokens * shape.top_k * shape.expert_weights
    for layer in layers:
        what = f"read by decode of a layer in {layer.weights}"
        read = at_least("kernels", what, 90, "% of the ceiling")
        what = f"products at {_TOKENS_PER_EXPERT} tokens per expert in {layer.weights}"
        products = at_least("kernels", what, 60, "% of the ceiling")
        if layer.name in left_out:
            lines += [target.line(None, left_out[layer.name]) for target in (read, products)]
            continue
        one = packed_expert_bytes((layer.weights,) * 3, shape.hidden, shape.intermediate)
        decode, prefill = [], []
        for ceilings, (step, prompt) in rounds[layer.name]:
            decode.append((ceilings.read_s(shape.top_k * one), step.median_s))
            least_s = max(ceilings.products_s(flops, layer.weights), ceilings.read_s(shape.experts * one))
            prefill.append((least_s, prompt.median_s))
        lines.append(share_line(read, shape.top_k * one, "GB/s", decode))
        lines.append(share_line(products, flops, "Gop/s", prefill))
    return lines


def layers_of(settings: Settings, threads: int) -> list[Layer]:
    return [
        Layer(OURS, name, settings.python, settings.shape, threads, settings.seed)
        for name in settings.formats
    ]


def between_ceilings(
    settings: Settings, layer: Layer, cases: Sequence[Case]
) -> tuple[Ceilings, list[Timing]]:
    """A layer's turn, and the higher ceilings of before and after: what memory gives on a shared machine changes by
    half within minutes.
    """
    before, timings, after = ceilings(settings), layer.measure(cases), ceilings(settings)
    return Ceilings("", settings.threads, {name: max(before[name], after[name]) for name in before}), timings


def ceilings(settings: Settings) -> dict[str, float]:
    """Rates on all threads at TWOFOLD_ISA's level. Raises BenchmarkError."""
    command = [settings.python, str(ROOT / _CEILINGS), "--threads", str(settings.threads)]
    lines = json_lines(command, _CEILINGS, "make build")
    if not lines or not isinstance(lines[-1], dict):
        raise BenchmarkError(f"{_CEILINGS} printed no result")
    return lines[-1]


def share_line(target: Target, work: float, unit: str, turns: Sequence[tuple[float, float]]) -> Line:
    """The median turn's share of its ceiling. turns: the least seconds that the ceiling allows, and those measured."""
    ordered = sorted((100 * least_s / took_s, work / took_s / 1e9) for least_s, took_s in turns)
    share, rate = ordered[len(ordered) // 2]
    note = (
        f"{rate:.0f} of {100 * rate / share:.0f} {unit}, a whole layer, median of {len(turns)} turns "
        f"({ordered[0][0]:.0f}-{ordered[-1][0]:.0f} %)"
    )
    return target.line(share, note)


def small_batches(settings: Settings) -> list[Line]:
    """2 to 64 tokens through one layer, over (experts touched ÷ top-k) × the time of one token: the worst of them."""
    lines = []
    cases = [(tokens, max(6, 64 // tokens), False) for tokens in _BATCHES]
    for threads in dict.fromkeys((1, settings.threads)):
        layers = layers_of(settings, threads)
        ways = {layer.name: partial(layer.measure, cases) for layer in layers}
        rounds, left_out = take_turns(ways, settings.rounds, "batches", shown)
        for layer in layers:
            what = f"2 to 64 tokens ÷ (experts touched × one token ÷ top-k), {threads} thread{'s' * (threads > 1)}"
            target = at_most("batches", f"{what}, {layer.weights}", 1.25, "×")
            if layer.name in left_out:
                lines.append(target.line(None, left_out[layer.name]))
                continue
            factors = amortisation(rounds[layer.name], settings.shape.top_k)
            note = ", ".join(f"{tokens}: {factor:.2f}" for tokens, factor in factors.items())
            lines.append(target.line(max(factors.values()), f"tokens: factor {note}"))
    return lines


def amortisation(turns: Sequence[Sequence[Timing]], top_k: int) -> dict[int, float]:
    """tokens -> time ÷ (experts touched ÷ top-k × time of one token), the median over turns. Their first case is of one
    token.
    """
    factors: dict[int, list[float]] = {}
    for one, *several in turns:
        for timing in several:
            expected_s = one.median_s * statistics.mean(timing.touched) / top_k
            factors.setdefault(timing.tokens, []).append(timing.median_s / expected_s)
    return {tokens: statistics.median(of_turns) for tokens, of_turns in factors.items()}
