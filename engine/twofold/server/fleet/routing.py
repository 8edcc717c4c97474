"""Ray Serve's interface to `choice.ranked`: what each replica published, and what was sent to it since."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from twofold.server.fleet.choice import ReplicaLoad, matched, ranked
from twofold.server.fleet.forwarding import RoutedRequest

_MAX_SENT: Final = 4096
_SENT_S: Final = 30.0
"""How long a prefix counts as cached where it was sent. Until then the replica has published it, or lost it."""
_LOST_S: Final = 6.0
"""How long a replica whose connection broke gets no request. By then Ray has seen its actor's end: it looks every 5
seconds."""


@dataclass
class _Known:
    """State of one replica."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    """The published statistics that `published` was made from."""
    published: frozenset[bytes] = frozenset()
    sent: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    """Labels of requests sent there, with the time until which they count."""
    sent_models: dict[str, float] = field(default_factory=dict)
    """The same of the models that they named."""
    num_ongoing: int = 0
    """Requests that this gateway sent there and that are not answered."""
    lost_until: float = 0.0

    @property
    def models(self) -> set[str]:
        """Models that it has loaded, or is loading for a request."""
        now = time.monotonic()
        self.sent_models = {name: until for name, until in self.sent_models.items() if until > now}
        return {*self.stats.get("models", ()), *self.sent_models}

    def __contains__(self, label: object) -> bool:
        if label in self.published:
            return True
        return isinstance(label, bytes) and self.sent.get(label, 0.0) > time.monotonic()

    def begin(self, request: RoutedRequest) -> None:
        """Note that the request is sent there."""
        until = time.monotonic() + _SENT_S
        self.num_ongoing += 1
        self.sent_models[request.model] = until
        for label in request.labels:
            self.sent[label] = until
            self.sent.move_to_end(label)
        while len(self.sent) > _MAX_SENT:
            self.sent.popitem(last=False)

    def end(self, is_lost: bool) -> None:
        """Note that a request has ended, or that the connection broke."""
        self.num_ongoing -= 1
        if is_lost:
            self.lost_until = time.monotonic() + _LOST_S


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses the replica that holds the longest prefix of a request."""

    def initialize_state(self, **_kwargs: Any) -> None:
        self._gateway = uuid.uuid4().hex
        self._known: dict[ReplicaID, _Known] = {}
        self._random = Random()  # noqa: S311 (spreads load)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica; none while the connections to all of them are broken. Ray asks again then."""
        assert pending_request is not None
        request: RoutedRequest = pending_request.args[0]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        self._known = {key: self._known.get(key) or _Known() for key in by_id}
        now = time.monotonic()
        usable = {key: each for key, each in by_id.items() if self._known[key].lost_until <= now}
        loads = {key: self._load(replica, request.model) for key, replica in usable.items()}
        groups = ranked(request.labels, loads, self._random)
        if not groups:
            return []
        chosen = groups[0][0]
        if request.attempt:
            request.routed_by = "retry"
        elif matched(request.labels, loads[chosen]):
            request.routed_by = "prefix"
        request.gateway, request.end = self._gateway, self._known[chosen].end
        request.replicas = {key.unique_id: each.replica_metadata for key, each in usable.items()}
        self._known[chosen].begin(request)
        return [[by_id[chosen]]]

    def _load(self, replica: RunningReplica, model: str) -> ReplicaLoad:
        known = self._known[replica.replica_id]
        stats = replica.routing_stats or {}
        if stats is not known.stats:
            known.stats = stats
            known.published = frozenset(stats.get("labels", ()))
        models = known.models if "models" in stats else {model}
        elsewhere = sum(num for name, num in stats.get("ongoing", {}).items() if name != self._gateway)
        return ReplicaLoad(
            known,
            num_ongoing=known.num_ongoing + elsewhere,
            kv_usage=stats.get("kv_usage", 0.0),
            has_model=model in models,
            num_models=len(models),
            tpot_ms=stats.get("tpot_ms", 0.0),
        )
