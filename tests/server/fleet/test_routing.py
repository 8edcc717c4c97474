"""The router's knowledge of replicas: what it sent, what they published, whose connections broke."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

from ray.serve.request_router import ReplicaID
from twofold.server.fleet import routing
from twofold.server.fleet.forwarding import RoutedRequest
from twofold.server.fleet.routing import PrefixRouter


def replica(name: str, **stats: Any) -> Any:
    """A replica as Ray describes it."""
    identity = ReplicaID(name, None)
    metadata = {"url": f"http://{name}", "secret": "s"}
    return SimpleNamespace(replica_id=identity, routing_stats=stats, replica_metadata=metadata)


class Fleet:
    """A router over some replicas."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = list(replicas)
        self.router = PrefixRouter.__new__(PrefixRouter)
        self.router.initialize_state()

    def choose(self, *labels: bytes, attempt: int = 0) -> tuple[str | None, RoutedRequest]:
        """The chosen replica, and the request as its gateway sees it."""
        request = RoutedRequest(labels, attempt=attempt)
        pending: Any = SimpleNamespace(args=[request])
        groups = asyncio.run(self.router.choose_replicas(self.replicas, pending))
        return (groups[0][0].replica_id.unique_id if groups else None), request


def test_a_prefix_leads_to_the_replica_that_published_it_or_that_it_was_sent_to() -> None:
    fleet = Fleet(replica("one"), replica("two", labels=[b"a"]))
    name, request = fleet.choose(b"a", b"b")
    assert (name, request.routed_by) == ("two", "prefix")
    assert request.replicas["one"]["url"] == "http://one"
    first, request = fleet.choose(b"c")
    assert request.routed_by == "load"
    again, request = fleet.choose(b"c", b"d")
    assert (again, request.routed_by) == (first, "prefix")


def test_requests_of_this_gateway_and_of_others_count() -> None:
    fleet = Fleet(replica("one", ongoing={"another": 2}), replica("two"))
    running = [fleet.choose() for _ in range(2)]
    assert [name for name, _ in running] == ["two", "two"]
    for _, request in running:
        request.end(False)
    assert fleet.choose()[0] == "two"
    fleet.replicas[0] = replica("one", ongoing={request.gateway: 5})  # this gateway counts its own
    assert fleet.choose()[0] == "one"


def test_a_broken_connection_keeps_requests_away_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(routing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    fleet = Fleet(replica("one", labels=[b"a"]), replica("two"))
    name, request = fleet.choose(b"a")
    request.end(True)
    other, request = fleet.choose(b"a", attempt=1)
    assert (name, other, request.routed_by) == ("one", "two", "retry")
    request.end(True)
    assert fleet.choose(b"a")[0] is None
    now[0] += 7
    assert fleet.choose(b"a")[0] == "one"
