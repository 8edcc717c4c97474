"""Predicted memory of each rank of `--tensor-parallel-size`, before any machine has loaded its share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from twofold import _core
from twofold.api.config import EngineConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.panels import Matrices
from twofold.experts.spread import RankShare
from twofold.fit.plan import USUAL_CONTEXT
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import WORKING_BYTES, gib, measure_files
from twofold.step.expert_loading import expert_spread


@dataclass(frozen=True)
class RankBytes:
    """Predicted host memory of one rank."""

    rank: int
    machine: int
    """Number of its machine, as --node-rank counts."""
    weight_bytes: int
    kv_cache_bytes: int
    """KV cache and one record; rank 0 alone has them."""
    working_bytes: int = WORKING_BYTES

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_cache_bytes + self.working_bytes


@dataclass(frozen=True)
class RanksFit:
    """Predicted memory of all ranks, and whether this machine holds its own."""

    ranks: tuple[RankBytes, ...]
    context: int
    """Tokens of KV cache."""
    machine: int
    """This machine's number."""
    available_bytes: int
    """Memory of this machine that is available."""

    @property
    def machine_bytes(self) -> list[int]:
        """Bytes of each machine's ranks."""
        machines = range(1 + max(each.machine for each in self.ranks))
        return [sum(each.total_bytes for each in self.ranks if each.machine == number) for number in machines]

    @property
    def fits(self) -> bool:
        return self.machine_bytes[self.machine] <= self.available_bytes

    def lines(self) -> Iterator[str]:
        """The table."""
        yield f"fit: predicted memory of {len(self.ranks)} ranks, from the sizes of tensors; no rank was loaded"
        yield f"  {'rank':>4}  {'machine':>7}  {'weights':>11}  {'KV cache':>11}  {'working':>11}  {'together':>11}"
        for each in self.ranks:
            sizes = (each.weight_bytes, each.kv_cache_bytes, each.working_bytes, each.total_bytes)
            yield f"  {each.rank:>4}  {each.machine:>7}  " + "  ".join(f"{gib(size):>11}" for size in sizes)
        yield f"  The KV cache is for {self.context} tokens (--max-total-tokens, --max-model-len)."
        for number, num_bytes in enumerate(self.machine_bytes):
            yield f"  predicted: machine {number} needs {gib(num_bytes)} of free memory{self._verdict(number)}"

    def _verdict(self, number: int) -> str:
        if number != self.machine:
            return ""
        return f"; this one has {gib(self.available_bytes)}: it {'fits' if self.fits else 'does not fit'}"


def fit_ranks(
    config: EngineConfig, parallel: ParallelConfig, files: ModelFiles, available_bytes: int
) -> RanksFit:
    """The memory of each rank. Packs no weights; norms, routers and latent attention's projections are read.

    Raises:
        ConfigError: the statistics of experts cannot be used, or are missing.
    """
    size = measure_files(files, kv_cache_dtype=config.kv_cache_dtype)
    longest = min(config.max_model_len or USUAL_CONTEXT, files.config.max_context)
    context = config.max_total_tokens or longest
    share = _MeasuredShare(parallel)
    measured = files.from_panels(share)
    _measure_cuts(measured)
    dense, experts = share.bytes_of, _expert_bytes(config, measured, parallel)
    weights = [cut + held for cut, held in zip(dense, experts, strict=True)]
    weights[0] = experts[0] + size.dense_bytes - sum(dense[1:])
    on_each = parallel.tensor_parallel_size // parallel.nnodes
    cache = size.kv_bytes_per_token * context + size.bytes_per_sequence
    ranks = tuple(
        RankBytes(rank, rank // on_each, num_bytes, 0 if rank else cache)
        for rank, num_bytes in enumerate(weights)
    )
    return RanksFit(ranks, context, parallel.node_rank, available_bytes)


class _MeasuredShare(RankShare):
    """Adds up the bytes that each rank would pack, and packs none."""

    def __init__(self, parallel: ParallelConfig) -> None:
        size = parallel.tensor_parallel_size
        # A matrix without a number is rank 0's: rank 1 packs nothing of it.
        super().__init__(_core.Ranks(1, size, send_job=_refuse, receive=_refuse), parallel)
        self.bytes_of = [0] * size

    def matrix(
        self, pool: ops.ThreadPool, name: str, matrices: Matrices, *, by_head: bool = False
    ) -> ops.PackedMatrix:
        """See `Panels.matrix`."""
        parts = matrices()
        if self.is_cut(parts, by_head=by_head):
            for part in parts:
                for rank, num_bytes in enumerate(_panel_bytes(part.rows, part.packed_bytes, self.ranks.size)):
                    self.bytes_of[rank] += num_bytes
        return ops.PackedMatrix(pool, parts, self.ranks)


def _refuse(*given: object) -> None:
    raise AssertionError("a measured share sends nothing")


def _panel_bytes(rows: int, packed_bytes: int, num_ranks: int) -> list[int]:
    """Each rank's bytes of a matrix that is cut by panels, as `PackedMatrix` cuts it."""
    num_panels = -(-rows // _core.panel_rows())
    each = packed_bytes // num_panels
    ends = [num_panels * rank // num_ranks * each for rank in range(num_ranks + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def _measure_cuts(files: ModelFiles) -> None:
    """Let the share of `files` add up the matrices that are cut."""
    pool = ops.ThreadPool(1)
    moe_layer = 0
    for layer in files.layers:
        for block, weights in layer:
            if not isinstance(block, ExpertBlock):
                block.cpu(weights, pool, moe_layer)
        moe_layer += any(isinstance(block, ExpertBlock) for block, _ in layer)
    files.config.head.cpu(files.head, pool)


def _expert_bytes(config: EngineConfig, files: ModelFiles, parallel: ParallelConfig) -> list[int]:
    """Each rank's bytes of routed experts."""
    model, num_ranks = files.config, parallel.tensor_parallel_size
    sizes = [size for formats in files.expert_formats() for size in model.routed.bytes_by_expert(formats)]
    spread = expert_spread(config, files)
    if spread is None:
        return [sum(sizes), *[0] * (num_ranks - 1)]
    held = [0] * num_ranks
    for size, holders in zip(sizes, spread.holders, strict=True):
        for rank in range(num_ranks):
            held[rank] += size * (holders >> rank & 1)
    return held


def as_json(fit: RanksFit) -> dict[str, object]:
    """The same as one JSON object."""
    return {
        "fits": fit.fits,
        "available_bytes": fit.available_bytes,
        "context": fit.context,
        "predicted": {
            "ranks": [dataclasses.asdict(each) | {"total_bytes": each.total_bytes} for each in fit.ranks],
            "machine_bytes": fit.machine_bytes,
        },
    }
