"""Reads and validates a request body without trusting its size, its speed or its shape."""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from twofold.server.api_errors import ApiError, from_validation
from twofold.server.state import ServerState

M = TypeVar("M", bound=BaseModel)

READ_TIMEOUT_S: Final = 60.0
"""A client that takes longer to send its body is refused, so that slow ones cannot hold connections for ever.
"""

_INLINE_BYTES: Final = 64 * 1024
"""Bodies up to here are parsed on the event loop (well under a millisecond); larger ones on a worker."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. ApiError 413 as soon as it is known to be too large, 408 when it does not arrive."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {READ_TIMEOUT_S:.0f} s") from None
    return b"".join(parts)


async def parse_body(request: Request, schema: type[M], state: ServerState) -> M:
    """The body as `schema`. ApiError 400 naming the field that is wrong."""
    body = await read_body(request, state.config.max_body_bytes)
    try:
        if len(body) <= _INLINE_BYTES:
            return schema.model_validate_json(body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(state.workers, schema.model_validate_json, body)
    except ValidationError as error:
        raise from_validation(error) from None


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than the {max_bytes} bytes this server accepts (--max-body-bytes)",
        code="request_too_large",
        # The rest of the body is not read, so the connection cannot be used again.
        headers={"Connection": "close"},
    )
