"""The choice of a replica: a cached prefix first, then the shorter queue, then room in the KV cache."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

Key = TypeVar("Key")

_MAX_LEAD: Final = 8
_MAX_RATIO: Final = 1.5
"""A replica with the prefix is passed over when its queue exceeds both: the shortest queue times `_MAX_RATIO`, and the
shortest queue plus `_MAX_LEAD`. Waiting then costs more than computing the prefix again."""
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

    @property
    def is_full(self) -> bool:
        return self.kv_usage >= _FULL


def matched(labels: Sequence[bytes], load: ReplicaLoad) -> int:
    """Number of leading labels that the replica's cache holds."""
    return next((end for end in range(len(labels), 0, -1) if labels[end - 1] in load.labels), 0)


def ranked(labels: Sequence[bytes], replicas: Mapping[Key, ReplicaLoad], random: Random) -> list[list[Key]]:
    """Groups of replicas in order of preference, each in order of load.

    The first group holds the replicas with the longest cached prefix, unless all of them are overloaded. The second
    holds two random ones (Mitzenmacher, "The power of two choices", 2001), so that several gateways with the same
    information do not all choose the same replica. The last holds the others.
    """
    if not replicas:
        return []
    shortest = min(load.num_ongoing for load in replicas.values())
    most = max(_MAX_RATIO * shortest, shortest + _MAX_LEAD)
    depth = {key: matched(labels, load) for key, load in replicas.items()}
    usable = [key for key, load in replicas.items() if load.num_ongoing <= most and not load.is_full]
    best = max((depth[key] for key in usable), default=0)
    first = [key for key in usable if best and depth[key] == best]
    others = [key for key in replicas if key not in first]
    pair = random.sample(others, min(2, len(others)))
    groups = [first, pair, [key for key in others if key not in pair]]
    return [sorted(group, key=lambda key: _load(replicas[key])) for group in groups if group]


def _load(load: ReplicaLoad) -> tuple[bool, int, float]:
    return load.is_full, load.num_ongoing, load.kv_usage
