"""Ray Serve's interface to `choice.ranked`: what each replica published, and what was sent to it since."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from twofold.server.fleet.choice import ReplicaLoad, matched, ranked
from twofold.server.fleet.forwarding import ForwardedRequest

_MAX_SENT: Final = 4096
_SENT_S: Final = 30.0
"""How long a prefix counts as cached where it was sent. Until then the replica has published it, or lost it."""


@dataclass
class _Known:
    """What is known of one replica."""

    stats: Mapping[str, Any] = field(default_factory=dict)
    """The published statistics that `published` was made from."""
    published: frozenset[bytes] = frozenset()
    sent: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    """Labels of requests sent there, with the time until which they count."""
    sent_models: dict[str, float] = field(default_factory=dict)
    """The same of the models that they named."""

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


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that holds the longest prefix of it."""

    def initialize_state(self, **_kwargs: Any) -> None:
        self._known: dict[ReplicaID, _Known] = {}
        self._random = Random()  # noqa: S311 (spreads load)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        model = _model(pending_request)
        loads = {key: self._load(replica, model) for key, replica in by_id.items()}
        labels = _labels(pending_request)
        groups = ranked(labels, loads, self._random)
        if pending_request is not None and labels:
            matching = tuple(key.unique_id for key in groups[0] if matched(labels, loads[key]))
            pending_request.args[0] = replace(pending_request.args[0], matched_by=matching)
        return [[by_id[key] for key in group] for group in groups]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        sent, until = self._known.setdefault(replica_id, _Known()).sent, time.monotonic() + _SENT_S
        self._known[replica_id].sent_models[_model(pending_request)] = until
        for label in _labels(pending_request):
            sent[label] = until
            sent.move_to_end(label)
        while len(sent) > _MAX_SENT:
            sent.popitem(last=False)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._known.pop(replica_id, None)

    def _load(self, replica: RunningReplica, model: str) -> ReplicaLoad:
        known = self._known.setdefault(replica.replica_id, _Known())
        stats = replica.routing_stats or {}
        if stats is not known.stats:
            known.stats = stats
            known.published = frozenset(stats.get("labels", ()))
        models = known.models if "models" in stats else {model}
        queued = self.replica_queue_len_cache.get(replica.replica_id)
        return ReplicaLoad(
            known,
            num_ongoing=queued or 0,
            kv_usage=stats.get("kv_usage", 0.0),
            has_model=model in models,
            num_models=len(models),
            tpot_ms=stats.get("tpot_ms", 0.0),
        )


def _model(request: PendingRequest | None) -> str:
    first = request.args[0] if request is not None and request.args else None
    return first.model if isinstance(first, ForwardedRequest) else ""


def _labels(request: PendingRequest | None) -> tuple[bytes, ...]:
    first = request.args[0] if request is not None and request.args else None
    return first.labels if isinstance(first, ForwardedRequest) else ()
