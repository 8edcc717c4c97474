"""What this machine can do at most, and which share of it prefill and decode reach.

The ceilings are measured, all threads at once: a plain read of memory, products that stay in registers, an empty
parallel loop. What a step must read and multiply is what the model's blocks say they cost, so a share near 1 leaves
nothing to gain but by fewer bytes or fewer products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from twofold.blocks import ops

if TYPE_CHECKING:
    from twofold.blocks.block import BlockWeights, Cost
    from twofold.models.model_files import ModelFiles

_RATE: Final = "_gop_per_s"


@dataclass(frozen=True)
class Ceilings:
    """Of the level that the CPU's kernels run at, with the engine's number of threads."""

    isa: str
    threads: int
    figures: Mapping[str, float]
    """read_gb_per_s, fork_join_us, and <kind>_gop_per_s of every kind of product that the level has."""

    def as_json(self) -> dict[str, Any]:
        return {"cpu_isa": self.isa, "cpu_threads": self.threads, **self.figures}

    def table(self) -> str:
        """Three lines for a person."""
        products = ", ".join(
            f"{name.removesuffix(_RATE).replace('_', ' in ')} {rate:,.0f}"
            for name, rate in self.figures.items()
            if name.endswith(_RATE)
        )
        return (
            f"this machine at most ({self.isa}, {self.threads} threads)\n"
            f"  read {self.figures['read_gb_per_s']:.1f} GB/s; an empty loop over all threads "
            f"{self.figures['fork_join_us']:.1f} us\n  products, Gop/s: {products}"
        )

    def read_s(self, num_bytes: float) -> float:
        """Seconds to read so many bytes at the ceiling."""
        return num_bytes / self.figures["read_gb_per_s"] / 1e9

    def products_s(self, flops: float, format_name: str) -> float:
        """Seconds of so many operations on weights of a format in registers, by the best products that the level has
        for it.
        """
        kind = ops.products_of(format_name)
        kinds = (kind, kind.removesuffix("_tiles"))
        return flops / max(self.figures[name] for k in kinds if (name := f"{k}{_RATE}") in self.figures) / 1e9


def measure_ceilings(cpu_threads: int, numa: str) -> Ceilings:
    """On threads placed as the engine's; takes about a second. ConfigError where TWOFOLD_ISA or numa cannot be met."""
    pool = ops.ThreadPool(cpu_threads, numa)
    return Ceilings(ops.isa_choice()[0], pool.num_threads, ops.measure_ceilings(pool))


@dataclass(frozen=True)
class LeastTimes:
    """Seconds that steps take at the ceilings."""

    num_bytes: float
    read_s: float
    products_s: float

    def shares(self, measured_s: float) -> dict[str, float]:
        return {
            "gb": self.num_bytes / 1e9,
            "of_read": self.read_s / measured_s,
            "of_products": self.products_s / measured_s,
        }


def least_times(
    ceilings: Ceilings, files: ModelFiles, tokens: int, behind: int, step_tokens: int
) -> LeastTimes:
    """Of `tokens` tokens of one sequence behind `behind` others, at most `step_tokens` a step; the last one goes on
    to the head. Bytes of routed experts are those of the most that the step's tokens can choose.
    """
    num_bytes = products_s = 0.0
    for weights, cost in _costs(files, tokens, behind, step_tokens):
        num_bytes += cost.num_bytes
        sizes = {part: math.prod(spec.shape) for part, spec in weights.specs.items() if len(spec.shape) > 1}
        for part, size in sizes.items():
            flops = cost.flops * size / sum(sizes.values())
            products_s += ceilings.products_s(flops, weights.format(part))
    return LeastTimes(num_bytes, ceilings.read_s(num_bytes), products_s)


def _costs(
    files: ModelFiles, tokens: int, behind: int, step_tokens: int
) -> Iterator[tuple[BlockWeights, Cost]]:
    for begin in range(0, tokens, step_tokens):
        for block, weights in files.blocks():
            yield weights, block.cost(weights, min(step_tokens, tokens - begin), behind + begin)
    yield files.head, files.config.head.cost(files.head)
