"""Sizes the KV cache before it is allocated, and states the reason.

Computes sizes only. `kv_cache` allocates pages and records; the memory is native.
"""

from __future__ import annotations

from dataclasses import dataclass

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.models.config import ModelConfig
from twofold.weights.host_memory import available_memory_bytes

_DEFAULT_CONTEXTS = 8
_MEMORY_SHARE = 0.25
_RECORDS_SHARE = 0.5
"""Largest fraction of the cache's memory for records, where no number of tokens is configured."""

_SNAPSHOTS_SHARE = 0.125
_MAX_SNAPSHOTS = 64
DRAFTED_SEQUENCES = 4
"""Sequences whose drafts of full depth have records at the same time."""


@dataclass(frozen=True)
class CacheCapacity:
    """Size of the KV cache, and the reason for it."""

    num_pages: int
    max_context: int
    """Longest prompt plus answer of one request, in tokens."""
    reason: str
    num_records: int | None = None
    """Maximum number of running sequences where each needs a record; None where none does."""
    num_snapshots: int = 0
    """Records that the prefix cache can keep in addition."""
    num_draft_records: int = 0
    """Further records, for the state after each draft of a step."""


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Prompt plus answer of one request, in tokens. ConfigError: --max-model-len exceeds the model's context."""
    requested = config.max_model_len or model.max_context
    if requested > model.max_context:
        raise ConfigError(
            f"--max-model-len was given {requested}; the model's context ends at {model.max_context}"
        )
    return requested


def plan_capacity(
    config: EngineConfig, model: ModelConfig, reserved_bytes: int = 0, draft_token_bytes: int = 0
) -> CacheCapacity:
    """Size the cache: as configured, else eight full contexts within a quarter of the free memory.

    `reserved_bytes` count as used: those of mapped files, whose pages the system counts as free, and of adapters and a
    draft model that are loaded later. The draft model's cache gets as many tokens, of `draft_token_bytes` each.

    Where layers keep records, there is one per sequence of --max-num-seqs, or as many as fit; --speculative-config
    adds those of drafts.

    Raises:
        ConfigError: --max-model-len exceeds the model's context, or nothing fits.
    """
    max_context = longest_request(config, model)
    free_bytes = max(0, available_memory_bytes() - reserved_bytes)
    token_bytes = model.cache_bytes_per_token(model.cache_dtype(config.kv_cache_dtype)) + draft_token_bytes
    num_records, num_drafts = _records(config, model, int(free_bytes * _MEMORY_SHARE * _RECORDS_SHARE))
    record_bytes = ((num_records or 0) + num_drafts) * sum(model.record_bytes)
    affordable = (int(free_bytes * _MEMORY_SHARE) - record_bytes) // token_bytes
    if config.max_total_tokens is not None:
        tokens, reason = config.max_total_tokens, "set by --max-total-tokens"
    elif affordable < _DEFAULT_CONTEXTS * max_context:
        tokens, reason = affordable, f"{_MEMORY_SHARE:.0%} of free memory; --max-total-tokens overrides"
    else:
        tokens, reason = _DEFAULT_CONTEXTS * max_context, f"{_DEFAULT_CONTEXTS} full contexts"
    num_pages = tokens // config.page_size
    if num_pages < 1:
        raise ConfigError(
            f"the KV cache would hold {tokens} tokens, less than one page of {config.page_size} ({reason}); "
            "raise --max-total-tokens or free memory"
        )
    return CacheCapacity(
        num_pages,
        min(max_context, num_pages * config.page_size),
        reason,
        num_records,
        num_snapshots=plan_snapshots(config, sum(model.record_bytes), free_bytes),
        num_draft_records=num_drafts,
    )


def plan_snapshots(config: EngineConfig, record_bytes: int, free_bytes: int) -> int:
    """How many records of `record_bytes` the prefix cache can keep in `free_bytes` of host memory."""
    if not config.enable_prefix_caching or record_bytes == 0:
        return 0
    if config.snapshot_bytes is not None:
        return config.snapshot_bytes // record_bytes
    return min(int(free_bytes * _SNAPSHOTS_SHARE) // record_bytes, _MAX_SNAPSHOTS)


def _records(config: EngineConfig, model: ModelConfig, room: int) -> tuple[int | None, int]:
    """Records of sequences and of drafts. ConfigError: not even one sequence fits."""
    one = sum(model.record_bytes)
    if one == 0:
        return None, 0
    depth = 0 if config.speculative_config is None else config.speculation.num_speculative_tokens
    count = min(config.max_num_seqs, room // one - depth)
    if count < 1:
        raise ConfigError(
            f"a sequence's record takes {one / 1e6:.1f} MB, but only {room / 1e6:.1f} MB of memory is available for "
            "records; free memory"
        )
    return count, min(depth * min(count, DRAFTED_SEQUENCES), room // one - count)
