"""HTTP routes to record expert routing: /admin/experts/…, and SGLang's routes for it.

Both need the admin key. SGLang's routes take GET and POST, as in SGLang.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from twofold.api.errors import ConfigError
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import small_body
from twofold.server.http.errors import ApiError

_MAX_BODY: Final = 4096


class StartBody(BaseModel):
    """Recording mode; without a body the mode that the server was started with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: str | None = None


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/admin/experts")
    async def status(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(state.queried(request).engine_while_draining.recording.status)

    async def start(request: Request) -> dict[str, Any]:
        requested = await small_body(request, StartBody, _MAX_BODY, if_empty=b"{}")
        return await asyncio.to_thread(state.queried(request).engine.recording.start, requested.mode)

    async def stop(request: Request) -> dict[str, Any]:
        return await asyncio.to_thread(state.queried(request).engine_while_draining.recording.stop)

    async def dump(request: Request) -> dict[str, Any]:
        try:
            return await asyncio.to_thread(state.queried(request).engine_while_draining.recording.dump)
        except ConfigError as error:
            raise ApiError(500, str(error), code="cannot_write") from None

    for name, work in (("start", start), ("stop", stop), ("dump", dump)):
        routes.add_api_route(f"/admin/experts/{name}", work, methods=["POST"])
        routes.add_api_route(f"/{name}_expert_distribution_record", work, methods=["GET", "POST"])
    return routes
