"""Performance ceilings of this machine, and the shares of them that prefill and decode reach (roofline).

The ceilings are measured on all threads at once: a plain read of memory, products on values in registers, an empty
parallel loop. The bytes and products of a step come from the model's blocks, so with a share near 1 only fewer bytes
or fewer products make it faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from twofold.blocks import ops

if TYPE_CHECKING:
    from twofold.blocks.block import Cost
    from twofold.blocks.block_weights import BlockWeights
    from twofold.models.model_files import ModelFiles

_RATE: Final = "_gop_per_s"


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of the CPU kernels' ISA level, with the engine's number of threads."""

    isa: str
    threads: int
    figures: Mapping[str, float]
    """read_gb_per_s, fork_join_us, and <kind>_gop_per_s for every kind of product at this level."""

    def as_json(self) -> dict[str, Any]:
        return {"cpu_isa": self.isa, "cpu_threads": self.threads, **self.figures}

    def table(self) -> str:
        """The ceilings as three lines of text."""
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
        """Seconds to read this many bytes at the ceiling."""
        return num_bytes / self.figures["read_gb_per_s"] / 1e9

    def products_s(self, flops: float, format_name: str) -> float:
        """Seconds for this many operations on weights of a format, in registers, by the fastest products of the level
        for it.
        """
        kind = ops.products_of(format_name)
        kinds = (kind, kind.removesuffix("_tiles"))
        return flops / max(self.figures[name] for k in kinds if (name := f"{k}{_RATE}") in self.figures) / 1e9


def measure_ceilings(cpu_threads: int, numa: str) -> Ceilings:
    """Measure on threads placed like the engine's; about a second. ConfigError: TWOFOLD_ISA or numa cannot be met."""
    pool = ops.ThreadPool(cpu_threads, numa)
    return Ceilings(ops.isa_choice()[0], pool.num_threads, ops.measure_ceilings(pool))


@dataclass(frozen=True)
class LeastTimes:
    """Least times of steps, at the ceilings, in seconds."""

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
    ceilings: Ceilings, files: ModelFiles, tokens: int, *, context_len: int, step_tokens: int
) -> LeastTimes:
    """Least times of `tokens` tokens of one sequence at context length `context_len`, at most `step_tokens` a step.

    Only the last token uses the head. Routed experts count as the most experts that the step's tokens can choose.
    """
    num_bytes = products_s = 0.0
    for weights, cost in _costs(files, tokens, context_len, step_tokens):
        num_bytes += cost.num_bytes
        sizes = {part: math.prod(spec.shape) for part, spec in weights.specs.items() if len(spec.shape) > 1}
        for part, size in sizes.items():
            flops = cost.flops * size / sum(sizes.values())
            products_s += ceilings.products_s(flops, weights.format(part))
    return LeastTimes(num_bytes, ceilings.read_s(num_bytes), products_s)


def _costs(
    files: ModelFiles, tokens: int, context_len: int, step_tokens: int
) -> Iterator[tuple[BlockWeights, Cost]]:
    for begin in range(0, tokens, step_tokens):
        for block, weights in files.blocks():
            yield weights, block.cost(weights, min(step_tokens, tokens - begin), context_len + begin)
    yield files.head, files.config.head.cost(files.head)
