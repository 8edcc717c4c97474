"""HTTP routes to record expert routing: /admin/experts/…, and SGLang's routes for it.

Both need the admin key. SGLang's routes take GET and POST, as in SGLang.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, ValidationError

from twofold.api.errors import ConfigError
from twofold.server.bridge.request_body import read_body
from twofold.server.bridge.state import ServerState
from twofold.server.http import errors as api_errors
from twofold.server.http.errors import ApiError

_MAX_BODY: Final = 4096


class StartBody(BaseModel):
    """Recording mode; without a body the mode that the server was started with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: str | None = None


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/admin/experts")
    async def status() -> dict[str, Any]:
        return await asyncio.to_thread(state.engine_while_draining.recording.status)

    async def start(request: Request) -> dict[str, Any]:
        body = await read_body(request, _MAX_BODY)
        try:
            mode = StartBody.model_validate_json(body).mode if body.strip() else None
        except ValidationError as error:
            raise api_errors.from_validation(error) from None
        return await asyncio.to_thread(state.engine.recording.start, mode)

    async def stop() -> dict[str, Any]:
        return await asyncio.to_thread(state.engine_while_draining.recording.stop)

    async def dump() -> dict[str, Any]:
        try:
            return await asyncio.to_thread(state.engine_while_draining.recording.dump)
        except ConfigError as error:
            raise ApiError(500, str(error), kind="server_error", code="cannot_write") from None

    for name, work in (("start", start), ("stop", stop), ("dump", dump)):
        routes.add_api_route(f"/admin/experts/{name}", work, methods=["POST"])
        routes.add_api_route(f"/{name}_expert_distribution_record", work, methods=["GET", "POST"])
    return routes
