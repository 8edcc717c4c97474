"""Builds the page pool of a loaded model, with a prefix cache where enabled and possible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from twofold import __version__
from twofold.api.config import EngineConfig
from twofold.blocks import ops
from twofold.engine.kv_cache import PagePool
from twofold.engine.packing import source_mark
from twofold.engine.prefix.cache import CachingPool
from twofold.engine.prefix.store import PrefixStore
from twofold.models import ModelFiles
from twofold.step.runner import LoadedRunner

_log = logging.getLogger(__name__)


def make_pool(
    config: EngineConfig,
    files: ModelFiles,
    loaded: LoadedRunner,
    accelerator: str = "none",
    levels: tuple[str, ...] = (),
    store: PrefixStore | None = None,
) -> PagePool:
    """Page pool with the sizes of `loaded`.

    levels: CPU kernel levels by module; empty: the process's level. store: one that other engines use too, which its
    owner closes; None: one of its own, if configured.
    """
    if not config.enable_prefix_caching:
        return PagePool(loaded.num_pages, config.page_size, loaded.num_records, loaded.draft_records)
    if loaded.num_records is not None and loaded.num_snapshots == 0:
        _log.warning(
            "prefix caching is off: not even one record snapshot (%.1f MB) fits; raise --snapshot-bytes",
            sum(files.config.record_bytes) / 1e6,
        )
        return PagePool(loaded.num_pages, config.page_size, loaded.num_records, loaded.draft_records)
    return CachingPool(
        loaded.num_pages,
        config.page_size,
        loaded.num_records,
        loaded.draft_records,
        memory=loaded.memory,
        cost=recompute_cost(files),
        num_snapshots=loaded.num_snapshots,
        key=_key(config, files, accelerator, levels),
        store=store or open_store(config),
        keeps_store=store is not None,
        depends_on_length=files.config.rope.kind == "dynamic",
    )


def open_store(config: EngineConfig) -> PrefixStore | None:
    """Open the on-disk store. None if not configured, or, with a log line, if it cannot be opened; the start never
    fails."""
    if config.prefix_cache_dir is None:
        return None
    directory = Path(config.prefix_cache_dir).expanduser()
    try:
        return PrefixStore(directory, config.prefix_cache_bytes)
    except BlockingIOError:
        why = "another process uses this directory"
    except OSError as error:
        why = str(error)
    _log.warning("--prefix-cache-dir %s: %s; prefixes are cached in memory only", directory, why)
    return None


def _key(config: EngineConfig, files: ModelFiles, accelerator: str, levels: tuple[str, ...]) -> bytes:
    """Everything besides tokens that decides the bits of a page: the model's files and configuration, the data type,
    the devices that compute it, and their kernels."""
    if config.prefix_cache_dir is None:
        return b""
    computed_by = "cuda" if accelerator.startswith("cuda") else ops.isa_choice()[0]
    parts = (
        source_mark(files),
        *([repr(files.recoded_formats)] if any(files.recoded_formats) else []),
        repr(files.config),
        config.kv_cache_dtype,
        str(config.page_size),
        computed_by,
        *levels,
        __version__,
    )
    return blake2b("\n".join(parts).encode(), digest_size=32).digest()


def recompute_cost(files: ModelFiles) -> Callable[[int, int], float]:
    """Cost in FLOPs of a sequence's tokens from one position to another: a constant per token plus a part that grows
    with context length, as far as layers attend."""
    far = files.config.max_context - 1

    def flops(context_len: int) -> float:
        return sum(block.cost(weights, 1, context_len).flops for block, weights in files.blocks())

    alone = flops(0)
    slope = (flops(far) - alone) / max(far, 1)
    return lambda begin, end: (end - begin) * (alone + slope * (begin + end) / 2)
