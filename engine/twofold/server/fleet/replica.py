"""A replica: one engine and its HTTP application inside a Ray actor, without a socket of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

from ray import serve

from twofold.api.config import ServerConfig
from twofold.server.app import app_of
from twofold.server.bridge.state import ServerState
from twofold.server.fleet.asgi_call import respond
from twofold.server.fleet.forwarding import BodyPart, ForwardedRequest, ResponseStart, WholeResponse

_NO_START: Final = ResponseStart(500, ())


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


class Replica:
    """Ray Serve's callable for one replica. Its constructor returns once the single model is loaded."""

    def __init__(self, load: ModelLoader, config: ServerConfig) -> None:
        self._id: str = serve.get_replica_context().replica_id.unique_id
        self._loaded = load(self._id)
        self._state = self._loaded.state(config)
        self._app = app_of(self._state)
        self._state.body_worker.start()
        self._describing: asyncio.Future[None] | None = None

    async def handle(self, request: ForwardedRequest) -> AsyncIterator[ResponseStart | BodyPart]:
        """The response of the application, in parts."""
        if self._state.manager is not None and self._describing is None:
            self._describing = asyncio.ensure_future(self._state.manager.describe_all())
        async for part in respond(self._app, request, self._id):
            yield part

    async def whole(self, request: ForwardedRequest) -> WholeResponse:
        """The response of a route that streams nothing."""
        parts = [part async for part in respond(self._app, request, self._id)]
        status, headers = next((part for part in parts if isinstance(part, ResponseStart)), _NO_START)
        body = b"".join(part.data for part in parts if isinstance(part, BodyPart))
        return WholeResponse(self._id, status, headers, body)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What `PrefixRouter` reads: cached prefixes, KV-cache use, speed and loaded models."""
        state = self._state
        loaded = [(model, engine) for model in state.loaded_models if (engine := model.loaded_engine)]
        labels: list[bytes] = []
        for _, engine in loaded:
            # Waits for a step to end; on the loop it would hold up every stream of the replica.
            labels += await asyncio.to_thread(engine.control.prefix_labels)
        stats = [engine.stats() for _, engine in loaded]
        used = [1.0 - each.num_free_pages / max(1, each.num_pages) for each in stats]
        tpot_s = max((model.metrics.recent_tpot_s() for model, _ in loaded), default=0.0)
        found = {"labels": labels, "kv_usage": max(used, default=0.0), "tpot_ms": 1e3 * tpot_s}
        if state.manager is None:
            return found
        names = [name for model, _ in loaded for name in model.names]
        return found | {"models": names + [""] * (state.default.loaded_engine is not None)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling` reads: waiting requests, and the 95th percentile of recent TTFTs in milliseconds."""
        models = self._state.loaded_models
        engines = [engine for model in models if (engine := model.loaded_engine)]
        ttft_s = max((model.metrics.recent_ttft_p95_s() for model in models), default=0.0)
        return {
            "num_waiting": float(sum(each.stats().num_waiting for each in engines)),
            "ttft_p95_ms": 1e3 * ttft_s,
        }

    def __del__(self) -> None:
        if hasattr(self, "_state"):
            self._state.close()
            self._loaded.close()
