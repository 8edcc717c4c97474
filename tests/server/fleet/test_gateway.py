"""The gateway with replicas that fail on purpose: retried before the first token, an error after it."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

from ray.exceptions import ActorDiedError
from starlette.requests import Request
from twofold.server.fleet.forwarding import BodyPart, ForwardedRequest, ResponseStart, WholeResponse
from twofold.server.fleet.gateway import Gateway
from twofold.server.http.arrival import trace_id

LOST = "lost"
STREAM = ResponseStart(200, ((b"content-type", b"text/event-stream"),))
PREFACE, PING = BodyPart("preface", b"id-"), BodyPart("ping", b": ping\n\n")


def answer(text: bytes) -> BodyPart:
    return BodyPart("answer", text)


class Parts:
    """A replica's response: the given parts; `LOST` raises what Ray raises when an actor has died."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __aiter__(self) -> "Parts":
        return self

    async def __anext__(self) -> Any:
        if not self._parts:
            raise StopAsyncIteration
        part = self._parts.pop(0)
        if part == LOST:
            raise ActorDiedError
        return part


class Broadcast:
    """What Ray returns for a call to every replica."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return self._answers


class Replicas:
    """Ray's handle of a deployment whose calls give the scripted responses, one after the other."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.calls = [Parts(list(script)) for script in scripts]
        self.requests: list[ForwardedRequest] = []
        self.pages: list[Any] = []
        """Answers of `broadcast`."""

    def options(self, **options: Any) -> "Replicas":
        assert options == {"method_name": "handle", "stream": True}
        return self

    def broadcast(self, method: str, request: ForwardedRequest) -> "Broadcast":
        assert (method, request.path) == ("whole", "/metrics")
        return Broadcast(self.pages)

    def remote(self, request: ForwardedRequest) -> Parts:
        self.requests.append(request)
        return self.calls[len(self.requests) - 1]


def ask(
    replicas: Replicas,
    path: str = "/v1/chat/completions",
    body: bytes = b"{}",
    *,
    method: str = "POST",
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> tuple[int, bytes]:
    """Status and body that the client gets."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def call() -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"connection", b"close"), (b"x-request-id", b"mine"), *headers],
        }
        response = await Gateway(replicas, 1 << 20)(Request(scope, receive))
        chunks: Any = getattr(response, "body_iterator", None)
        if not isinstance(chunks, AsyncIterator):
            return response.status_code, bytes(response.body)
        return response.status_code, b"".join([chunk async for chunk in chunks])

    return asyncio.run(call())


def test_a_response_passes_through() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    replicas = Replicas([STREAM, PREFACE, PING, answer(b"one"), PING, answer(b"two")])
    assert ask(replicas, body=body) == (200, b": ping\n\nid-one: ping\n\ntwo")
    (request,) = replicas.requests
    assert request.headers[0] == (b"x-request-id", b"mine")
    assert trace_id(dict(request.headers)[b"traceparent"].decode())
    assert len(request.labels) == 1
    assert replicas.calls[0].is_cancelled  # frees the call in every case


@pytest.mark.parametrize(
    "lost", [[LOST], [STREAM, LOST], [STREAM, PREFACE, LOST], [STREAM, PREFACE, PING, LOST]]
)
def test_a_replica_lost_before_the_first_token_is_replaced_unnoticed(lost: list[Any]) -> None:
    other = BodyPart("preface", b"other-")
    replicas = Replicas(lost, [STREAM, other, answer(b"text")])
    status, body = ask(replicas)
    assert (status, body.removeprefix(b": ping\n\n")) == (200, b"other-text")
    first, second = replicas.requests
    assert (first.attempt, second.attempt) == (0, 1)
    assert second == replace(first, attempt=1)
    assert (first.routed_by("a"), second.routed_by("a")) == ("load", "retry")


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        ("/v1/chat/completions", b"\n\ndata: [DONE]\n\n"),
        ("/v1/messages", b"}}\n\n"),
        ("/api/chat", b"}\n"),
    ],
)
def test_a_replica_lost_after_the_first_token_ends_the_stream_with_an_error(path: str, ending: bytes) -> None:
    status, body = ask(Replicas([STREAM, PREFACE, answer(b"one"), LOST]), path)
    assert status == 200
    assert body.startswith(b"id-one")
    assert b"the replica that computed this answer was lost" in body
    assert body.endswith(ending)
    assert (b"event: error" in body) == (path == "/v1/messages")


def test_a_request_that_loses_every_replica_gets_503() -> None:
    status, body = ask(Replicas(*[[LOST]] * 4))
    assert status == 503
    assert json.loads(body)["error"]["code"] == "replicas_lost"


def test_a_body_beyond_the_limit_reaches_no_replica() -> None:
    replicas = Replicas()
    assert ask(replicas, body=b" " * (2 << 20))[0] == 413
    assert replicas.requests == []


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-00", True),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"ff-{TRACE}-b7ad6b7169203331-01", False),
        ("nonsense", False),
    ],
)
def test_a_valid_trace_is_passed_on_and_an_invalid_one_replaced(given: str, kept: bool) -> None:
    replicas = Replicas([STREAM, answer(b"text")])
    ask(replicas, headers=((b"traceparent", given.encode()), (b"tracestate", b"a=1")))
    (request,) = replicas.requests
    passed = [value.decode() for name, value in request.headers if name == b"traceparent"]
    assert (passed == [given]) is kept
    assert len(trace_id(passed[0])) == 32
    assert (b"tracestate" in dict(request.headers)) is kept


PAGE = '# HELP a Things.\n# TYPE a gauge\na{model_name="m"} 1\n# HELP b Others.\n# TYPE b gauge\nb 2\n'


def test_metrics_are_those_of_every_replica_that_answers() -> None:
    replicas = Replicas()
    replicas.pages = [
        WholeResponse("two", 200, ((b"content-type", b"text/plain"),), PAGE.encode()),
        ActorDiedError(),
        WholeResponse("one", 200, (), PAGE.encode()),
    ]
    status, page = ask(replicas, "/metrics", b"", method="GET")
    assert status == 200
    assert page.decode().splitlines() == [
        "# HELP a Things.",
        "# TYPE a gauge",
        'a{replica="one",model_name="m"} 1',
        'a{replica="two",model_name="m"} 1',
        "# HELP b Others.",
        "# TYPE b gauge",
        'b{replica="one"} 2',
        'b{replica="two"} 2',
    ]


def test_metrics_without_a_replica_are_an_error_and_a_refusal_passes_through() -> None:
    replicas = Replicas()
    assert ask(replicas, "/metrics", b"", method="GET")[0] == 503
    replicas.pages = [WholeResponse("one", 403, (), b"no")]
    assert ask(replicas, "/metrics", b"", method="GET") == (403, b"no")
