"""A replica: one engine and its HTTP application inside a Ray actor, without a socket of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

from ray import serve

from twofold.api.config import ServerConfig
from twofold.server.app import app_of
from twofold.server.bridge.served_model import LoadedModel
from twofold.server.bridge.state import ServerState
from twofold.server.fleet.asgi_call import respond
from twofold.server.fleet.forwarding import BodyPart, ForwardedRequest, ResponseStart, WholeResponse

_NO_START: Final = ResponseStart(500, ())


class ModelLoader(Protocol):
    """Loads a replica's model. Pickled to the replica's process."""

    def __call__(self, replica: str) -> LoadedModel:
        """Load for the replica of this id."""


class Replica:
    """Ray Serve's callable for one replica. Its constructor returns once the model is loaded."""

    def __init__(self, load: ModelLoader, config: ServerConfig) -> None:
        self._id: str = serve.get_replica_context().replica_id.unique_id
        self._loaded = load(self._id)
        self._state = ServerState(config, self._loaded.sink)
        self._app = app_of(self._state)
        self._state.ready(self._loaded.engine, self._loaded.sampling_defaults)
        self._metrics = self._state.default.metrics
        self._state.body_worker.start()

    async def handle(self, request: ForwardedRequest) -> AsyncIterator[ResponseStart | BodyPart]:
        """The response of the application, in parts."""
        async for part in respond(self._app, request, self._id):
            yield part

    async def whole(self, request: ForwardedRequest) -> WholeResponse:
        """The response of a route that streams nothing."""
        parts = [part async for part in respond(self._app, request, self._id)]
        status, headers = next((part for part in parts if isinstance(part, ResponseStart)), _NO_START)
        body = b"".join(part.data for part in parts if isinstance(part, BodyPart))
        return WholeResponse(self._id, status, headers, body)

    async def record_routing_stats(self) -> dict[str, Any]:
        """What `PrefixRouter` reads: cached prefixes, KV-cache use and speed."""
        engine = self._loaded.engine
        stats = engine.stats()
        used = 1.0 - stats.num_free_pages / max(1, stats.num_pages)
        # Waits for a step to end; on the loop it would hold up every stream of the replica.
        labels = await asyncio.to_thread(engine.control.prefix_labels)
        return {"labels": labels, "kv_usage": used, "tpot_ms": 1e3 * self._metrics.recent_tpot_s()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling` reads: waiting requests, and the 95th percentile of recent TTFTs in milliseconds."""
        num_waiting = float(self._loaded.engine.stats().num_waiting)
        return {"num_waiting": num_waiting, "ttft_p95_ms": 1e3 * self._metrics.recent_ttft_p95_s()}

    def __del__(self) -> None:
        if hasattr(self, "_state"):
            self._state.close()
            self._loaded.close()
