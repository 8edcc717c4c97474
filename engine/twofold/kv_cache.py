"""Which pages of the KV cache belong to whom. The memory itself is native (`ops.KvCache`).

A page holds `page_size` tokens of every layer. Ask (`can_append`) before doing (`append`); nothing here raises in
normal running.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from twofold.config import EngineConfig
from twofold.errors import ConfigError
from twofold.model.config import ModelConfig

_DEFAULT_CONTEXTS = 8
_MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class CacheCapacity:
    """How large the KV cache is made, and why."""

    num_pages: int
    max_context: int
    """Longest prompt plus answer of one request, in tokens."""
    reason: str


def bytes_per_token(model: ModelConfig) -> int:
    """Keys and values of one token over all layers."""
    element_bytes = 2 if model.dtype == "bfloat16" else 4
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * element_bytes


def plan_capacity(config: EngineConfig, model: ModelConfig) -> CacheCapacity:
    """Size the cache: what was asked for, else eight full contexts within a quarter of the free memory.

    Raises:
        ConfigError: --max-model-len is beyond the model's context, or nothing fits.
    """
    max_context = config.max_model_len or model.max_position_embeddings
    if max_context > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len was given {max_context}; the model's context ends at {model.max_position_embeddings}"
        )
    affordable = int(_free_memory_bytes() * _MEMORY_SHARE) // bytes_per_token(model)
    if config.max_total_tokens is not None:
        tokens, reason = config.max_total_tokens, "asked for by --max-total-tokens"
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
    return CacheCapacity(num_pages, min(max_context, num_pages * config.page_size), reason)


def _free_memory_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: what is free without the page cache is a lower bound
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class PagePool:
    """A free list of page numbers 0 … num_pages-1."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.page_size)

    def can_append(self, pages: list[int], num_tokens: int) -> bool:
        """Whether a sequence that owns `pages` can grow to `num_tokens` tokens."""
        return self.pages_for(num_tokens) - len(pages) <= len(self._free)

    def append(self, pages: list[int], num_tokens: int) -> None:
        """Grow `pages` in place until it holds `num_tokens` tokens."""
        for _ in range(self.pages_for(num_tokens) - len(pages)):
            pages.append(self._free.pop())

    def release(self, pages: list[int]) -> None:
        """Take all of a sequence's pages back; `pages` is empty afterwards."""
        self._free.extend(reversed(pages))
        pages.clear()
