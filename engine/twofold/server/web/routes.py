"""Routes of the chat page: its files, Markdown as HTML, and the placement of each token of an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import FileResponse, PlainTextResponse

from twofold.api.addresses import without_password
from twofold.api.config import DASHBOARD_URL
from twofold.api.errors import ConfigError
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.middleware import CHAT_SCRIPTS
from twofold.server.bridge.requests.request_body import small_body
from twofold.server.http.bodies import Body
from twofold.server.http.errors import ApiError
from twofold.server.http.openapi import text_answer
from twofold.server.web.placement import answer_placement
from twofold.text.markdown.html import html_blocks
from twofold.text.markdown.parsing import MAX_CHARS

FILES: Final = {"/chat.css": "text/css", **{f"/{name}.js": "text/javascript" for name in CHAT_SCRIPTS}}
_MAX_BODY_BYTES: Final = 4 * MAX_CHARS
_HERE: Final = Path(__file__).parent
_HEADERS: Final = {
    # The page runs its own script only and talks to this server only; an answer's text is never HTML.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",  # for browsers and scanners that do not know frame-ancestors
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.get("/", response_class=PlainTextResponse, responses=text_answer("text/plain"))
    @routes.head("/", response_class=PlainTextResponse, include_in_schema=False)
    async def root(request: Request) -> Response:
        """The chat page for a browser. Ollama's clients detect a server by the text that other programs get."""
        if "text/html" in request.headers.get("accept", ""):
            return FileResponse(_HERE / "chat.html", media_type="text/html", headers=_HEADERS)
        return PlainTextResponse("Ollama is running", headers={"vary": "accept"})

    for path, media_type in FILES.items():
        routes.add_api_route(path, _file_route(path, media_type), include_in_schema=False)

    @routes.get("/chat/placement/{request_id}", response_model=None)
    async def placement(request_id: str) -> dict[str, Any]:
        runs = [model.sink.run_id for model in state.loaded_models if model.sink is not None]
        if state.sink is None or not state.sink.url:
            raise ApiError(404, "placements are recorded with --telemetry-url only", code="no_telemetry")
        try:
            found = await asyncio.to_thread(answer_placement, state.sink.url, runs, request_id)
        except ConfigError as error:
            raise ApiError(503, str(error), code="telemetry_unreadable") from None
        if found is None:
            raise ApiError(404, f"no request {request_id[:200]!r} is recorded yet", code="request_not_found")
        return found

    @routes.get("/chat/about", include_in_schema=False)
    async def about() -> dict[str, str | None]:
        """The dashboard's address and command, as far as the page may name them."""
        if state.sink is None or not state.sink.url:
            return {"dashboard": None, "dashboard_command": None}
        database = without_password(state.sink.url)
        return {
            "dashboard": state.config.dashboard_url or DASHBOARD_URL,
            "dashboard_command": f"twofold dashboard --telemetry-url {database}",
        }

    @routes.post("/chat/markdown", include_in_schema=False)
    async def markdown(request: Request) -> dict[str, Any]:
        """An answer's Markdown as HTML, block by block; needs no model."""
        text = (await small_body(request, _MarkdownBody, _MAX_BODY_BYTES)).text
        found = await asyncio.to_thread(html_blocks, text)
        return {"blocks": [block._asdict() for block in found]}

    return routes


class _MarkdownBody(Body):
    text: Annotated[str, Field(max_length=MAX_CHARS)]


def _file_route(path: str, media_type: str) -> Any:
    async def file() -> Response:
        return FileResponse(_HERE / path[1:], media_type=media_type, headers=_HEADERS)

    return file
