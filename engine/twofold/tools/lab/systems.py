"""Twofold and its nearest peers as rules: which experts are fetched, cached, and uploaded in the background.

A peer is its published decision rule under our cost model and the same virtual clock, not its code: only decisions are
compared. Handshake, kernels and formats are assumed equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class System:
    """`options` are keyword arguments of the core's `SchedulerConfig`."""

    name: str
    what: str
    options: Mapping[str, Any]


SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        System(
            "twofold",
            "best split of the misses, payback cache, uploads priced",
            {"policy": "payback"},
        ),
        System(
            "fiddler",
            "each miss by itself where the sum of costs is lower; the most popular experts stay",
            {"policy": "static", "fetch_rule": "min-sum", "background_uploads": False},
        ),
        System(
            "hybrimoe",
            "two-ended greedy; what was fetched is cached by its MRS score",
            {
                "policy": "mrs",
                "fetch_rule": "two-ended",
                "background_uploads": False,
                "always_cache_fetched": True,
            },
        ),
        System(
            "freetoken",
            "fetches the share link/(link + cpu) of the misses into one LRU pool of all layers",
            {
                "policy": "lru",
                "fetch_rule": "link-share",
                "background_uploads": False,
                "always_cache_fetched": True,
                "shared_pool": True,
            },
        ),
        System(
            "cpu-lru",
            "misses run on the CPU and are all uploaded behind, LRU",
            {"policy": "lru", "fetch_rule": "none"},
        ),
        System(
            "llama-cpp",
            "misses run on the CPU and are all uploaded behind, classes of recent frequency over LRU",
            {"policy": "frequency-lru", "fetch_rule": "none"},
        ),
        System(
            "pinned-lru",
            "as cpu-lru, but half the slots keep the most popular experts",
            {"policy": "pinned-lru", "fetch_rule": "none"},
        ),
        System(
            "ktransformers",
            "the most popular experts stay, misses run on the CPU",
            {"policy": "static", "fetch_rule": "none", "background_uploads": False},
        ),
    )
}
