"""The pool of a loaded model's pages and records: with a prefix cache where it is wanted and can be."""

from __future__ import annotations

import logging
from collections.abc import Callable

from twofold.api.config import EngineConfig
from twofold.engine.kv_cache import PagePool
from twofold.engine.prefix_cache import CachingPool
from twofold.engine.runner import LoadedRunner
from twofold.models import ModelFiles

_log = logging.getLogger(__name__)


def make_pool(config: EngineConfig, files: ModelFiles, loaded: LoadedRunner) -> PagePool:
    """Of the sizes that `loaded` was made for."""
    if not config.enable_prefix_caching:
        return PagePool(loaded.num_pages, config.page_size, loaded.num_records)
    if loaded.num_records is not None and loaded.num_snapshots == 0:
        _log.warning(
            "no prefix is cached: there is no memory for the record of one (%.1f MB); raise --snapshot-bytes",
            files.config.bytes_per_sequence / 1e6,
        )
        return PagePool(loaded.num_pages, config.page_size, loaded.num_records)
    return CachingPool(
        loaded.num_pages,
        config.page_size,
        loaded.num_records,
        memory=loaded.memory,
        cost=recompute_cost(files),
        num_snapshots=loaded.num_snapshots,
        by_length=files.config.rope.kind == "dynamic",
    )


def recompute_cost(files: ModelFiles) -> Callable[[int, int], float]:
    """Of a sequence's tokens from one position to another, in floating-point operations: so much a token, and more
    the more there are behind it, as far as layers look back."""
    far = files.config.max_context - 1

    def flops(behind: int) -> float:
        return sum(block.cost(weights, 1, behind).flops for block, weights in files.blocks())

    alone = flops(0)
    slope = (flops(far) - alone) / max(far, 1)
    return lambda begin, end: (end - begin) * (alone + slope * (begin + end) / 2)
