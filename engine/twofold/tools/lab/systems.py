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


def _system(name: str, what: str, policy: str, fetch_rule: str = "best-split", **rules: bool) -> System:
    return System(name, what, {"policy": policy, "fetch_rule": fetch_rule, **rules})


_AS_FETCHED: Final = {"background_uploads": False, "always_cache_fetched": True}
SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        _system("twofold", "best split of the misses, payback cache, uploads priced", "payback"),
        _system(
            "fiddler",
            "each miss by itself where the sum of costs is lower; the most popular experts stay",
            "static",
            "min-sum",
            background_uploads=False,
        ),
        _system(
            "hybrimoe",
            "two-ended greedy; what was fetched is cached by its MRS score",
            "mrs",
            "two-ended",
            **_AS_FETCHED,
        ),
        _system(
            "freetoken",
            "fetches the share link/(link + cpu) of the misses into one LRU pool of all layers",
            "lru",
            "link-share",
            shared_pool=True,
            **_AS_FETCHED,
        ),
        _system(
            "cpu-lru", "misses run on the CPU and are all uploaded in the background, LRU", "lru", "none"
        ),
        _system(
            "llama-cpp",
            "misses run on the CPU and are all uploaded in the background, classes of recent frequency over LRU",
            "frequency-lru",
            "none",
        ),
        _system(
            "pinned-lru", "as cpu-lru, but half the slots keep the most popular experts", "pinned-lru", "none"
        ),
        _system(
            "ktransformers",
            "the most popular experts stay, misses run on the CPU",
            "static",
            "none",
            background_uploads=False,
        ),
    )
}
