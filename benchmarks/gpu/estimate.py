"""Best results that `make bench-gpu` can measure, estimated per machine profile without a GPU.

    python -m benchmarks.gpu.estimate

A roofline: the longer of bytes over the memory's bandwidth and operations over the peak, both of the profile. Caches,
launches, and that decode's operations run beside the tensor cores whose peak this is, are left out; so a kernel may be
slower than this for good reasons, and a bound that lies below it cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from twofold.experts.profiles import load_profile, shipped_profiles
from twofold.weights.weight_format import packed_bytes

from benchmarks.gpu.cases import Case, Kind, expert_cases
from benchmarks.gpu.kernel_speed import COPY_SHARE, PRODUCT_SHARE
from benchmarks.gpu.models import SHAPES, Shape

_F32: Final = 4
_BF16: Final = 2


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one layer's experts."""

    weight_bytes: float
    row_bytes: float
    """Activations read and written: tokens, what lies between the two products, outputs."""
    flops: float


@dataclass(frozen=True)
class Estimate:
    """Estimated times in microseconds."""

    roofline: float
    bound: float
    """The limit in `make bench-gpu` if this profile's figures were its ceilings."""

    @property
    def can_hold(self) -> bool:
        return self.bound >= self.roofline


def work_of(kind: Kind, shape: Shape, format: str, tokens: int) -> Work:
    """Every token goes to `top_k` experts at random; an expert's weights are read once."""
    touched = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)
    expert = 2 * packed_bytes(format, shape.intermediate, shape.hidden)
    expert += packed_bytes(format, shape.hidden, shape.intermediate)
    pairs = tokens * shape.top_k
    # Prefill leaves gate and up as f32 for a kernel of its own; decode keeps them on the chip.
    between = 2 * 2 * _F32 * shape.intermediate if kind == "prefill" else 0
    of_pair = between + 2 * _BF16 * shape.intermediate + _F32 * shape.hidden
    rows = pairs * of_pair + tokens * _BF16 * shape.hidden
    return Work(touched * expert, rows, 6.0 * pairs * shape.hidden * shape.intermediate)


def estimate(kind: Kind, work: Work, bandwidth_gbps: float, gflops: float) -> Estimate:
    """The roofline beside the bound."""
    roofline = max((work.weight_bytes + work.row_bytes) / bandwidth_gbps, work.flops / gflops) / 1e3
    if kind == "decode":
        return Estimate(roofline, work.weight_bytes / (COPY_SHARE * bandwidth_gbps) / 1e3)
    return Estimate(roofline, work.flops / (PRODUCT_SHARE * gflops) / 1e3)


def lines(cases: Iterable[Case], profiles: Iterable[str] = shipped_profiles()) -> list[str]:
    """The table, for each case and profile: estimated time and bound."""
    figures = {name: load_profile(name).cost_figures for name in profiles}
    out = [
        "ESTIMATES, nothing here was measured: microseconds by a roofline of the machine profile <= the bound that "
        "`make bench-gpu` will check.",
        "(!) the bound is below the roofline, which no kernel can reach on such a card.",
        f"{'':40}{'MB':>8}{'GFLOP':>8}" + "".join(f"{name:>26}" for name in figures),
    ]
    for kind, shape, format, tokens in cases:
        work = work_of(kind, SHAPES[shape], format, tokens)
        line = f"{f'{kind} {shape} {format} {tokens} tokens':40}"
        line += f"{(work.weight_bytes + work.row_bytes) / 1e6:8.0f}{work.flops / 1e9:8.1f}"
        for profile in figures.values():
            of = estimate(kind, work, profile["vram_bandwidth_gbps"], profile["gpu_gflops"])
            text = (
                f"{of.roofline:.0f} <= {of.bound:.0f}"
                if of.can_hold
                else f"(!) {of.roofline:.0f} > {of.bound:.0f}"
            )
            line += f"{text:>26}"
        out.append(line)
    return out


if __name__ == "__main__":
    print("\n".join(lines(expert_cases())))
