"""Calls of an application inside a replica: parts in order, prefaces told apart, disconnects seen."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from twofold.server.fleet.asgi_call import respond
from twofold.server.fleet.forwarding import BodyPart, ForwardedRequest, ResponseStart
from twofold.server.http.arrival import call_answer_hook, origin_of, prefix_labels_of

REQUEST = ForwardedRequest(
    method="POST", path="/v1/x", query=b"a=1", headers=((b"host", b"h"),), body=b"body", labels=(b"l",)
)


def start(kind: bytes) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_a_stream_tells_preface_pings_and_answer_apart() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope, received=await receive())
        await send(start(b"text/event-stream; charset=utf-8"))
        await send(body(b"begin"))
        await send(body(b"ping"))
        call_answer_hook(scope)
        await send(body(b"one"))
        await send(body(b"two"))
        await send(body(b"", more=False))

    async def parts() -> list[Any]:
        request = replace(REQUEST, matched_by=("other", "me"))
        return [part async for part in respond(app, request, "me")]

    begin, *rest = asyncio.run(parts())
    assert isinstance(begin, ResponseStart)
    assert begin.status == 200
    assert (b"x-twofold-replica", b"me") in begin.headers
    assert origin_of(seen).routed_by == "prefix"
    assert rest == [BodyPart("preface", b"begin"), BodyPart("ping", b"ping"), BodyPart("answer", b"onetwo")]
    assert (seen["path"], seen["query_string"], seen["method"]) == ("/v1/x", b"a=1", "POST")
    assert seen["received"] == {"type": "http.request", "body": b"body", "more_body": False}
    assert prefix_labels_of(seen) == (b"l",)


def test_a_whole_body_is_an_answer_from_its_first_byte() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(b"application/json"))
        await send(body(b"{}", more=False))

    async def parts() -> list[Any]:
        return [part async for part in respond(app, REQUEST)]

    assert asyncio.run(parts())[1:] == [BodyPart("answer", b"{}")]


def test_closing_the_call_early_is_a_disconnect() -> None:
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start(b"text/event-stream"))
        events.append((await receive())["type"])

    async def leave() -> None:
        parts = respond(app, REQUEST)
        await anext(parts)
        await parts.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert events == ["http.disconnect"]


def test_an_error_of_the_application_reaches_the_caller() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    async def parts() -> list[Any]:
        return [part async for part in respond(app, REQUEST)]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(parts())
