"""A replica's application behind its door: gateways alone get in, the preface waits for the first token."""

import asyncio
from typing import Any

from twofold.server.fleet.forwarding import ROUTING_HEADER, TOKENS_BEGIN, RoutedRequest
from twofold.server.fleet.gateway_guard import GatewayGuard
from twofold.server.http.arrival import call_answer_hook, origin_of, prefix_labels_of

ROUTED = RoutedRequest(labels=(b"l",), gateway="g", routed_by="prefix")


def start(kind: bytes) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def no_message() -> Any:
    raise AssertionError("nothing is received")


def ask(guard: GatewayGuard, secret: str | None = None) -> list[Any]:
    """The response's messages."""
    reported = ROUTED.header(("10.0.0.1", 7), guard.secret if secret is None else secret)
    scope = {"type": "http", "client": None, "headers": [(ROUTING_HEADER, reported.encode())]}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(scope, no_message, send))
    return sent


def test_a_streams_preface_waits_for_its_first_token() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope, ongoing=dict(guard.ongoing))
        await send(start(b"text/event-stream; charset=utf-8"))
        await send(body(b"begin"))
        await send(body(b"ping"))
        call_answer_hook(scope)
        await send(body(b"one"))
        await send(body(b"two"))
        await send(body(b"", more=False))

    guard = GatewayGuard(app, "me")
    begin, *rest = ask(guard)
    assert (b"x-twofold-replica", b"me") in begin["headers"]
    assert [message["body"] for message in rest] == [b"ping", TOKENS_BEGIN + b"beginone", b"two", b""]
    assert origin_of(seen).routed_by == "prefix"
    assert prefix_labels_of(seen) == (b"l",)
    assert seen["client"] == ("10.0.0.1", 7)
    assert seen["ongoing"] == {"g": 1}
    assert guard.ongoing == {}


def test_a_stream_without_a_token_ends_with_its_preface() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(b"application/x-ndjson"))
        await send(body(b"begin"))
        await send(body(b"end", more=False))

    assert [message["body"] for message in ask(GatewayGuard(app, "me"))[1:]] == [TOKENS_BEGIN + b"beginend"]


def test_a_whole_body_passes_unchanged() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(b"application/json"))
        await send(body(b"{}", more=False))

    assert ask(GatewayGuard(app, "me"))[1]["body"] == b"{}"


def test_a_client_without_the_secret_reaches_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the application was reached")

    assert ask(GatewayGuard(app, "me"), "guessed")[0]["status"] == 403
