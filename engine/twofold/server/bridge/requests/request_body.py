"""Reads and validates a request body without trusting its size, its speed or its structure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from twofold.server.bridge.models.body_worker import parse
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.http import errors as api_errors
from twofold.server.http.arrival import set_model, times_of
from twofold.server.http.content_encoding import BodyDecoder
from twofold.server.http.errors import ApiError

M = TypeVar("M", bound=BaseModel)

READ_TIMEOUT_S: Final = 60.0
"""Time limit for receiving a body, so that slow clients cannot hold connections for ever."""

_BROWSER_HEADERS: Final = frozenset(("origin", "sec-fetch-site"))
"""Headers of which browsers send at least one with every POST; pages cannot leave them out."""

_MODEL: Final = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')
_MODEL_WITHIN_BYTES: Final = 2048
"""How far from either end of a body the model's name is looked for: clients send it first or last."""

_INLINE_BYTES: Final = 16 * 1024
"""Largest body parsed on the event loop (at most 5 ms); larger ones are parsed in a separate process."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, decompressed; max_bytes limits it both before and after.

    Raises:
        ApiError: 413 as soon as the body is known to be too large, 408 when it does not arrive in time, 415 or 400 when
            its Content-Encoding is unknown or wrong.
    """
    decoder = BodyDecoder(request.headers.get("content-encoding", ""))
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            parts = [part async for part in _decoded(request, decoder, max_bytes)]
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {READ_TIMEOUT_S:.0f} s") from None
    return b"".join(parts)


async def _decoded(request: Request, decoder: BodyDecoder, max_bytes: int) -> AsyncIterator[bytes]:
    """Pieces of the body. Raises as `read_body`."""
    received = size = 0
    async for arrived in request.stream():
        received += len(arrived)
        for part in decoder.pieces(arrived):
            size += len(part)
            if max(received, size) > max_bytes:
                raise _too_large(max_bytes)
            yield part
            if size > received:
                await asyncio.sleep(0)  # a small body can expand to many pieces
    if received:
        decoder.end()


async def parse_body(request: Request, schema: type[M], state: ServerState) -> M:
    """Parse the body as `schema`. ApiError 415 for a browser's body that is not declared as JSON, 400 naming the field
    that is wrong, 503 while there is no engine."""
    _refuse_undeclared_json_of_browsers(request)
    max_context, limits = state.max_context, state.context_limits
    times = times_of(request.scope)
    body = await read_body(request, state.config.max_body_bytes)
    times.mark("read")
    set_model(request.scope, _model_in(body))

    def in_worker() -> M:
        times.mark("parse_wait")
        return state.body_worker.parse(schema, body, max_context, limits)

    if len(body) <= _INLINE_BYTES:
        parsed = parse(schema, body, max_context, limits)
    else:
        parsed = await asyncio.get_running_loop().run_in_executor(state.threads.parsers, in_worker)
    times.mark("parse")
    return parsed


async def small_body(request: Request, schema: type[M], max_bytes: int, *, if_empty: bytes = b"") -> M:
    """Parse the body of an operator's request. ApiError 400, 408, 413."""
    body = await read_body(request, max_bytes)
    try:
        return schema.model_validate_json(body if body.strip() else if_empty)
    except ValidationError as error:
        raise api_errors.from_validation(error) from None


def translated(schema: type[M], fields: Mapping[str, Any], model: ServedModel) -> M:
    """Another API's request to `model` as `schema`, validated as if it had been sent; fields that are None are left
    out. ApiError 400 naming the field that is wrong."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        engine = model.engine
        limits = {"": (engine.max_context, engine.info.context_limit_reason)}
        context = {"max_context": engine.max_context, "limits": limits}
        return schema.model_validate(given, context=context)
    except ValidationError as error:
        raise api_errors.from_validation(error) from None


def _model_in(body: bytes) -> str:
    """The body's model for the log, which needs it of bodies that cannot be parsed, too; empty if it is not found."""
    for part in (body[:_MODEL_WITHIN_BYTES], body[-_MODEL_WITHIN_BYTES:]):
        if found := _MODEL.search(part):
            return found[1].decode(errors="replace")
    return ""


def _refuse_undeclared_json_of_browsers(request: Request) -> None:
    """ApiError 415 for a browser's body that is not declared as JSON.

    A web page can send any other type to another site without permission. For JSON the browser asks first, and is
    refused. Programs such as curl send neither of the headers that identify a browser; their bodies need no
    Content-Type.
    """
    if _BROWSER_HEADERS.isdisjoint(request.headers):
        return
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise ApiError(
        415,
        f"a browser sent this with the Content-Type {given[:200]!r}; send the body as 'Content-Type: application/json'",
        code="unsupported_media_type",
    )


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than the {max_bytes} bytes this server accepts (--max-body-bytes)",
        code="request_too_large",
        # The rest of the body stays unread, so the connection cannot be used again.
        headers={"Connection": "close"},
    )
