"""Outermost request wrapper: request id, response headers, authorisation, last-resort error handler.

Plain ASGI: Starlette's BaseHTTPMiddleware would buffer between the stream and the client's disconnect.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twofold.api.errors import TwofoldError
from twofold.server.bridge.models.state import ServerState
from twofold.server.http import errors as api_errors
from twofold.server.http.arrival import origin_of, set_origin, trace_id
from twofold.server.http.errors import ApiError
from twofold.server.http.web_pages import cross_origin_error

_logger = logging.getLogger("twofold.server")
CHAT_SCRIPTS: Final = ("chat", "chat_answer", "chat_colours", "chat_pictures", "chat_store", "chat_view")
"""Modules of the chat page."""
_OPEN: Final = frozenset(
    (
        *("/", "/chat.css", "/health", "/ready", "/metrics", "/version", "/openapi.json"),
        *(f"/{name}.js" for name in CHAT_SCRIPTS),
    )
)
"""Paths that never need a key."""
_ADMIN: Final = frozenset(
    (
        "/admin",
        "/api/create",
        *(f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump")),
        *(f"{place}/{verb}_lora_adapter" for place in ("", "/v1") for verb in ("load", "unload")),
    )
)
"""Admin routes under their own names: SGLang's, vLLM's and Ollama's too."""
_ADMIN_BEGINNINGS: Final = ("/admin/", "/api/blobs/")
_ADMIN_POSTS: Final = frozenset(("/lora-adapters",))
"""Paths of which POST alone is an admin route."""
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"))
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class RequestFrame:
    """Outermost layer of the application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        request_id, traceparent = _request_id(given), given.get("traceparent", "")
        if found := trace_id(traceparent):
            set_origin(scope, replace(origin_of(scope), trace_id=found))
        status = 0

        async def framed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                self._label(headers, request_id)
                if found:
                    headers["traceresponse"] = traceparent  # W3C Trace Context, level 2
                self._count(scope, message["status"])
                if scope["method"] == "POST" and message["status"] >= 400:
                    self._state.http.refused[str(message["status"])] += 1
            await send(message)

        try:
            refusal = self._refusal(scope["method"], scope["path"], given)
            if refusal is not None:
                await refusal.response(scope["path"])(scope, receive, framed_send)
            else:
                await self._app(scope, receive, framed_send)
        except Exception as error:
            # A bug of the server: the client gets a 500, the log gets the place; tracebacks need --debug.
            _logger.error("internal error in %s %s: %s", scope["method"], scope["path"], _where(error))
            _logger.debug("its traceback", exc_info=error)
            if not status:
                await api_errors.internal().response(scope["path"])(scope, receive, framed_send)
        finally:
            self._state.request_log.write(scope, status, request_id)
            spans = self._state.spans
            if (
                spans is not None
                and scope["method"] == "POST"
                and scope["path"] in self._state.computing_paths
            ):
                spans.write(scope, status)

    def _count(self, scope: Scope, status: int) -> None:
        # The route's template: paths are the client's choice and would make endless series.
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._state.http.answered[route, method, f"{status // 100}xx"] += 1

    def _label(self, headers: MutableHeaders, request_id: str) -> None:
        headers["x-request-id"] = request_id
        # All models of a server have the same accelerator.
        for model in self._state.loaded_models[:1]:
            engine = model.engine_while_draining
            headers["x-twofold-accelerator"] = engine.info.accelerator
            headers["x-twofold-clock"] = engine.info.clock

    def _refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """The error for a caller without a required key, or for a web page where no key is required.

        With a key set, `_OPEN` stays open to monitors.
        """
        config = self._state.config
        is_admin = path.startswith(_ADMIN_BEGINNINGS) or path in _ADMIN
        is_admin = is_admin or (method == "POST" and path in _ADMIN_POSTS)
        if is_admin and config.admin_key:
            # The admin key opens only these routes, and only it opens them.
            return None if _has_key(headers, [config.admin_key]) else _unauthorised("admin")
        if not config.api_key or path.startswith("/internal"):
            refusal = cross_origin_error(headers, config)
        elif path in _OPEN:
            return None
        else:
            refusal = None if _has_key(headers, config.api_key) else _unauthorised()
        if refusal is None and is_admin:
            return _no_admin_routes(path)
        if refusal is None and method == "POST" and path in self._state.computing_paths:
            return self._full()
        return refusal

    def _full(self) -> ApiError | None:
        """The refusal of a full server, before the request is read: the running requests need the time. With several
        models the request's body names the full one."""
        engine = self._state.default.loaded_engine
        if self._state.manager is not None or engine is None or self._state.phase != "ready":
            return None
        try:
            engine.check_room()
        except TwofoldError as error:
            return api_errors.from_twofold(error)
        return None


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _has_key(headers: Headers, keys: Sequence[str]) -> bool:
    kind, _, token = headers.get("authorization", "").partition(" ")
    given = (token if kind.lower() == "bearer" else "", headers.get("x-api-key", ""))
    # All keys are compared, so that the timing reveals nothing.
    matches = [hmac.compare_digest(one.strip().encode(), key.encode()) for one in given for key in keys]
    return any(matches)


def _unauthorised(which: str = "API") -> ApiError:
    return ApiError(
        401,
        f"this needs the server's {which} key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _no_admin_routes(path: str) -> ApiError:
    return ApiError(
        404,
        f"{path[:200]} exists only on a server that was started with --admin-key KEY (or TWOFOLD_ADMIN_KEY)",
        code="no_admin_key",
    )


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{type(error).__name__}: {error}{place}"
