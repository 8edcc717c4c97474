"""A replica: one engine and its HTTP application inside a Ray actor."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray import serve

from twofold.api.config import ServerConfig
from twofold.server.app import app_of
from twofold.server.bridge.models.state import ServerState
from twofold.server.fleet.gateway_guard import GatewayGuard
from twofold.server.fleet.serving_actor import ServingActor
from twofold.server.listening import bind, url_of


class LoadedReplica(Protocol):
    """The models of one replica, and all that ends with them."""

    def state(self, config: ServerConfig) -> ServerState:
        """The state of a server with these models."""

    def close(self) -> None:
        """End the engines and telemetry. Blocks."""


class ModelLoader(Protocol):
    """Loads a replica's models. Pickled to the replica's process."""

    def __call__(self, replica: str) -> LoadedReplica:
        """Load for the replica of this id."""


class Replica(ServingActor):
    """Ray Serve's callable for one replica. Its constructor returns once the single model is loaded."""

    async def __init__(self, load: ModelLoader, config: ServerConfig, host: str) -> None:  # type: ignore[misc]
        """host: address to listen on; empty: the address by which Ray's cluster knows this machine."""
        replica: str = serve.get_replica_context().replica_id.unique_id
        self._loaded = load(replica)
        self._state = self._loaded.state(config)
        self._state.body_worker.start()
        self._guard = GatewayGuard(app_of(self._state), replica)
        own = replace(
            config,
            host=host or ray.util.get_node_ip_address(),
            port=0,
            max_connections=None,
            ssl_certfile=None,
            ssl_keyfile=None,
        )
        listener = bind(own)
        self._url = url_of(own, listener)
        self.start(self._guard, listener, own)
        if self._state.manager is not None:
            self._describing = asyncio.ensure_future(self._state.manager.describe_all())

    def record_replica_metadata(self) -> dict[str, str]:
        """What Ray publishes to the gateways' routers alone (`RoutedRequest.replicas`)."""
        return {"url": self._url, "secret": self._guard.secret}

    async def record_routing_stats(self) -> dict[str, Any]:
        """What `PrefixRouter` reads: running requests, cached prefixes, KV-cache use, speed and loaded models."""
        state = self._state
        loaded = [(model, engine) for model in state.loaded_models if (engine := model.loaded_engine)]
        labels: list[bytes] = []
        for _, engine in loaded:
            # Waits for a step to end; on the loop it would hold up every stream of the replica.
            labels += await asyncio.to_thread(engine.control.prefix_labels)
        stats = [engine.stats() for _, engine in loaded]
        used = [1.0 - each.num_free_pages / max(1, each.num_pages) for each in stats]
        tpot_s = max((model.metrics.recent_tpot_s() for model, _ in loaded), default=0.0)
        found = {
            "ongoing": dict(self._guard.ongoing),
            "labels": labels,
            "kv_usage": max(used, default=0.0),
            "tpot_ms": 1e3 * tpot_s,
        }
        if state.manager is None:
            return found
        names = [name for model, _ in loaded for name in model.names]
        return found | {"models": names + [""] * (state.default.loaded_engine is not None)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling` reads: running requests, and the 95th percentile of recent TTFTs in milliseconds."""
        ttft_s = max((model.metrics.recent_ttft_p95_s() for model in self._state.loaded_models), default=0.0)
        return {"num_ongoing": float(self._guard.ongoing.total()), "ttft_p95_ms": 1e3 * ttft_s}

    async def __del__(self) -> None:
        """Called once by Ray, after it has told the gateways to send nothing more."""
        if hasattr(self, "_serving"):
            await self.drain()
        if hasattr(self, "_state"):
            self._state.close()
            self._loaded.close()
