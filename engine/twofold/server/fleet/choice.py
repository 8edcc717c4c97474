"""The choice of a replica: a cached prefix first, then the shorter wait, then room in the KV cache."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

Key = TypeVar("Key")

_MAX_LEAD: Final = 8
_MAX_RATIO: Final = 1.5
"""A replica with the prefix is passed over when its wait exceeds both: the shortest wait times `_MAX_RATIO`, and the
shortest wait plus `_MAX_LEAD`. Waiting then costs more than computing the prefix again. The unit of a wait is a request
of the fastest replica."""
_SLOW: Final = 3.0
"""A replica is slow when its time per token exceeds that of the fastest by this factor. Smaller differences are those
of batches and prompts."""
_FULL: Final = 0.95
"""Share of used KV pages from which a replica would preempt sequences to admit another."""


@dataclass(frozen=True)
class ReplicaLoad:
    """A replica as the router knows it."""

    labels: Container[bytes] = frozenset()
    """Prefixes in its cache, as `prefix_labels` names them."""
    num_ongoing: int = 0
    """Requests that it runs or queues."""
    kv_usage: float = 0.0
    """Share of KV-cache pages that running sequences use, 0 to 1."""
    has_model: bool = True
    """Whether it has loaded the request's model."""
    num_models: int = 0
    """Models that it has loaded, where a fleet has several."""
    tpot_ms: float = 0.0
    """Recent time per output token; 0: unknown."""

    @property
    def is_full(self) -> bool:
        return self.kv_usage >= _FULL


def matched(labels: Sequence[bytes], load: ReplicaLoad) -> int:
    """Number of leading labels that the replica's cache holds."""
    return next((end for end in range(len(labels), 0, -1) if labels[end - 1] in load.labels), 0)


def ranked(labels: Sequence[bytes], replicas: Mapping[Key, ReplicaLoad], random: Random) -> list[list[Key]]:
    """Groups of replicas in order of preference, each in order of wait.

    The first group holds the replicas with the longest cached prefix, unless all of them are overloaded. The second
    holds two random ones (Mitzenmacher, "The power of two choices", 2001), so that several gateways with the same
    information do not all choose the same replica: two that have loaded the model, unless all of these are overloaded;
    then two that have loaded the fewest models. The last holds the others.
    """
    if not replicas:
        return []
    waits = _waits(replicas)
    shortest = min(waits.values())
    most = max(_MAX_RATIO * shortest, shortest + _MAX_LEAD)
    depth = {key: matched(labels, load) for key, load in replicas.items()}
    usable = [key for key, load in replicas.items() if waits[key] <= most and not load.is_full]
    best = max((depth[key] for key in usable), default=0)
    first = [key for key in usable if best and depth[key] == best]
    others = [key for key in replicas if key not in first]
    drawn = [key for key in others if replicas[key].has_model and key in usable]
    if not drawn:
        fewest = min((replicas[key].num_models for key in others), default=0)
        drawn = [key for key in others if replicas[key].num_models == fewest]
    pair = random.sample(drawn, min(2, len(drawn)))
    groups = [first, pair, [key for key in others if key not in pair]]

    def cost(key: Key) -> tuple[bool, float, float]:
        return replicas[key].is_full, waits[key], replicas[key].kv_usage

    return [sorted(group, key=cost) for group in groups if group]


def _waits(replicas: Mapping[Key, ReplicaLoad]) -> dict[Key, float]:
    """Queue of each replica: its requests, more of them where tokens take longer."""
    fastest = min((load.tpot_ms for load in replicas.values() if load.tpot_ms), default=0.0)
    waits: dict[Key, float] = {}
    for key, load in replicas.items():
        ratio = load.tpot_ms / fastest if fastest else 1.0
        waits[key] = (load.num_ongoing + 1) * (ratio if ratio > _SLOW else 1.0) - 1
    return waits
