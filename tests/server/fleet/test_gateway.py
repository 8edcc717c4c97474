"""The gateway with replicas that fail on purpose: retried before the first token, an error after it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs twofold[ray]")

import aiohttp
from twofold.server.fleet.forwarding import ROUTING_HEADER, GatewayRouting, RoutedRequest
from twofold.server.fleet.gateway import Gateway
from twofold.server.http.arrival import trace_id

LOST = aiohttp.ServerDisconnectedError()
STREAM, PAGE_OF_TEXT = b"text/event-stream", b"text/plain"
PING = b": ping\n\n"


class Answer:
    """A replica's response of the given pieces; an exception among them is raised."""

    status = 200

    def __init__(self, kind: bytes, *pieces: bytes | Exception, status: int = 200) -> None:
        self.raw_headers = ((b"Content-Type", kind), (b"Transfer-Encoding", b"chunked"), (b"X-Mine", b"1"))
        self.status = status
        self._pieces = pieces
        self.content = self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.iter_any()])

    async def text(self) -> str:
        return (await self.read()).decode()


class Replicas:
    """Ray's handle of the replicas and the client that reaches them. Requests get the scripted answers in turn."""

    def __init__(self, *script: Answer | Exception) -> None:
        self.script = list(script)
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        """(method, URL, body, headers)"""
        self.attempts: list[int] = []
        self.ends: list[bool] = []
        """Reported ends of requests: whether the replica was lost."""
        self.ids = ["only"]

    @asynccontextmanager
    async def choose_replica(self, request: RoutedRequest, *, _reserve: bool) -> AsyncIterator[Any]:
        assert not _reserve
        self.attempts.append(request.attempt)
        request.end = self.ends.append
        request.replicas = {name: {"url": f"http://{name}", "secret": "s"} for name in self.ids}
        yield SimpleNamespace(replica_id=self.ids[0])

    @asynccontextmanager
    async def request(
        self, method: str, url: Any, *, data: Any, headers: Any, **_: Any
    ) -> AsyncIterator[Answer]:
        self.requests.append((method, str(url), data, dict(headers)))
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield answer


def ask(
    replicas: Replicas,
    path: str = "/v1/chat/completions",
    body: bytes = b"{}",
    *,
    method: str = "POST",
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> tuple[int, bytes]:
    """Status and body that the client gets."""
    request, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive() -> dict[str, Any]:
        return request.pop() if request else await asyncio.get_running_loop().create_future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"a=%20",
        "client": ("10.0.0.1", 7),
        "headers": [(b"connection", b"close"), (b"x-request-id", b"mine"), *headers],
    }
    asyncio.run(Gateway(replicas, replicas, 1 << 20)(scope, receive, send))
    assert len({name for name, _ in sent[0]["headers"]}) == len(sent[0]["headers"])
    assert [bool(message.get("more_body")) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return sent[0]["status"], b"".join(message["body"] for message in sent[1:])


def test_a_response_passes_through() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    replicas = Replicas(Answer(STREAM, PING, PING + b"\0id-one", PING, b"two"))
    assert ask(replicas, body=body) == (200, b": ping\n\n: ping\n\nid-one: ping\n\ntwo")
    ((method, url, passed, headers),) = replicas.requests
    assert (method, url, passed) == ("POST", "http://only/v1/chat/completions?a=%20", body)
    assert headers["x-request-id"] == "mine"
    assert "connection" not in headers
    assert trace_id(headers["traceparent"])
    secret, _, reported = headers[ROUTING_HEADER.decode()].partition(" ")
    routing = GatewayRouting.read(reported.encode())
    assert (secret, len(routing.labels), routing.client) == ("s", 1, ("10.0.0.1", 7))
    assert replicas.ends == [False]


@pytest.mark.parametrize("lost", [LOST, Answer(STREAM, LOST), Answer(STREAM, PING, LOST)])
def test_a_replica_lost_before_the_first_token_is_replaced_transparently(lost: Answer | Exception) -> None:
    replicas = Replicas(lost, Answer(STREAM, b"\0other-text"))
    status, body = ask(replicas)
    assert (status, body.removeprefix(PING)) == (200, b"other-text")
    assert replicas.attempts == [0, 1]
    assert replicas.ends == [True, False]


def test_a_replica_lost_during_a_whole_answer_is_replaced_transparently() -> None:
    replicas = Replicas(Answer(b"application/json", b'{"a', LOST), Answer(b"application/json", b"{}"))
    assert ask(replicas) == (200, b"{}")


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        ("/v1/chat/completions", b"\n\ndata: [DONE]\n\n"),
        ("/v1/messages", b"}}\n\n"),
        ("/api/chat", b"}\n"),
    ],
)
def test_a_replica_lost_after_the_first_token_ends_the_stream_with_an_error(path: str, ending: bytes) -> None:
    status, body = ask(Replicas(Answer(STREAM, b"\0id-one", LOST)), path)
    assert status == 200
    assert body.startswith(b"id-one")
    assert b"the replica that computed this answer was lost" in body
    assert body.endswith(ending)
    assert (b"event: error" in body) == (path == "/v1/messages")


def test_a_request_that_loses_every_replica_gets_503() -> None:
    status, body = ask(Replicas(*[LOST] * 4))
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
    replicas = Replicas(Answer(STREAM, b"\0text"))
    ask(replicas, headers=((b"traceparent", given.encode()), (b"tracestate", b"a=1")))
    passed = replicas.requests[0][3]
    assert (passed["traceparent"] == given) is kept
    assert len(trace_id(passed["traceparent"])) == 32
    assert ("tracestate" in passed) is kept


PAGE = '# HELP a Things.\n# TYPE a gauge\na{model_name="m"} 1\n# HELP b Others.\n# TYPE b gauge\nb 2\n'


def test_metrics_are_those_of_every_replica_that_answers() -> None:
    pages = [Answer(PAGE_OF_TEXT, PAGE.encode()) for _ in range(3)]
    replicas = Replicas(pages[0], pages[1], LOST, pages[2])
    replicas.ids = ["two", "lost", "one"]
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


def test_a_refusal_of_the_metrics_passes_through() -> None:
    assert ask(Replicas(Answer(PAGE_OF_TEXT, b"no", status=403)), "/metrics", b"", method="GET") == (
        403,
        b"no",
    )
