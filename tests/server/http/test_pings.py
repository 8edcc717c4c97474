"""Streams that are silent for long, on a loop whose clock jumps to the next timer: nothing waits for real."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from fake_engine import FakeEngine
from live_server import serving
from starlette.responses import Response
from twofold.api.config import ServerConfig
from twofold.api.errors import CapacityError
from twofold.api.types import Chunk, GenerationRequest, Usage
from twofold.server.app import create_app

MESSAGES = [{"role": "user", "content": "a b"}]
REQUESTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a b"},
    "/v1/responses": {"input": "a b"},
    "/v1/messages": {"model": "fake-tales", "max_tokens": 9, "messages": MESSAGES},
    "/api/chat": {"model": "fake-tales", "messages": MESSAGES},
    "/api/generate": {"model": "fake-tales", "prompt": "a b"},
}
FIRST_S, LAST_S = 63.0, 107.0
"""When the answer's words come."""
LONGEST_S = 10.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its time stands still while something runs and jumps to the next timer when nothing does."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        is_idle = not self._ready and not self._selector.select(0)  # type: ignore[attr-defined]
        if is_idle and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class LateEngine(FakeEngine):
    """Says "a " after `FIRST_S` and "b " after `LAST_S`, by the loop's clock, which is at 0 until `begin`."""

    loop: asyncio.AbstractEventLoop
    request: GenerationRequest | None = None
    thinks = False
    """Every four seconds until it answers."""

    def submit(self, request: GenerationRequest) -> None:
        if self.fail_on_submit is not None:
            raise self.fail_on_submit
        self.request = request

    def begin(self) -> None:
        request = self.request
        assert request is not None

        def say(text: str, last: bool = False) -> None:
            usage = Usage(2, 2, 0.0, 0.25, 0.5, "wall", 1) if last else None
            request.on_chunk(Chunk(text, (0,), "stop" if last else None, usage))
            assert request.after_step is not None
            request.after_step()

        for second in range(4, int(FIRST_S), 4) if self.thinks else ():
            self.loop.call_later(second, say, "<think>" if second == 4 else "hm ")
        self.loop.call_later(FIRST_S, say, "</think>a " if self.thinks else "a ")
        self.loop.call_later(LAST_S, say, "b ", True)


@pytest.fixture
def engine() -> Iterator[LateEngine]:
    late = LateEngine()
    yield late
    late.close()


def requested(engine: LateEngine, path: str, body: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """Messages that the application sends, and their times."""
    loop = JumpingLoop()
    engine.loop = loop
    sent: list[tuple[float, dict[str, Any]]] = []

    async def answer() -> None:
        parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            return parts.pop() if parts else await loop.create_future()

        async def send(message: Any) -> None:
            sent.append((loop.time(), message))
            if message["type"] == "http.response.start" and message["status"] == 200:
                engine.begin()

        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
            "query_string": b"",
            "scheme": "http",
            "server": ("127.0.0.1", 1),
            "client": ("127.0.0.1", 2),
            "http_version": "1.1",
            "root_path": "",
        }
        await create_app(engine, ServerConfig(reasoning_parser="qwen3"))(scope, receive, send)

    try:
        loop.run_until_complete(answer())
    finally:
        loop.close()
    return sent


@pytest.mark.parametrize("path", REQUESTED)
def test_no_stream_is_silent_for_ten_seconds(engine: LateEngine, path: str) -> None:
    sent = requested(engine, path, REQUESTED[path] | {"stream": True})
    begun, head = sent[0]
    assert (begun, head["type"], head["status"]) == (0.0, "http.response.start", 200)
    times = [at for at, message in sent if message["type"] == "http.response.start" or message["body"]]
    assert times[-1] == LAST_S
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= LONGEST_S
    # Clients ignore what came before the answer.
    text = b"".join(message.get("body", b"") for _, message in sent).decode()
    if path.startswith("/api/"):
        lines = [json.loads(line) for line in text.splitlines()]
        reply = "".join(
            line.get("response", "") + line.get("message", {}).get("content", "") for line in lines
        )
        assert (reply, lines[-1]["done"]) == ("a b ", True)
    elif path == "/v1/messages":
        assert text.count("event: ping\n") >= LAST_S / LONGEST_S
    else:
        assert text.count(": ping\n\n") >= LAST_S / LONGEST_S


def test_anthropics_client_is_given_an_event_in_a_minute_of_silence(engine: LateEngine) -> None:
    """The client drops `ping`, so that Claude Code sees none of them."""
    path = "/v1/messages"
    sent = requested(engine, path, REQUESTED[path] | {"stream": True})
    still = [at for at, message in sent if b'"stop_reason":null' in message.get("body", b"")]
    assert still == [0.0, 60.0]
    body = b"".join(message.get("body", b"") for _, message in sent)
    with (
        serving(Response(body, media_type="text/event-stream")) as base,
        anthropic.Anthropic(base_url=base, api_key="x", max_retries=0) as client,
        client.messages.stream(**REQUESTED[path]) as stream,
    ):
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[:3] == ["message_start", "message_delta", "content_block_start"]
    assert (message.content[0].text, message.stop_reason, message.usage.output_tokens) == (
        "a b ",
        "end_turn",
        2,
    )


def test_a_stream_whose_thinking_is_hidden_pings(engine: LateEngine) -> None:
    engine.thinks = True
    path = "/v1/chat/completions"
    sent = requested(engine, path, REQUESTED[path] | {"stream": True, "include_reasoning": False})
    text = b"".join(message.get("body", b"") for _, message in sent).decode()
    assert '"content":"a' in text
    assert "hm" not in text
    times = [at for at, message in sent if message.get("body")]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= LONGEST_S


@pytest.mark.parametrize("path", REQUESTED)
def test_a_refusal_keeps_its_status(engine: LateEngine, path: str) -> None:
    engine.fail_on_submit = CapacityError("all places are taken; try again later", retry_after_s=2.5)
    ((_, head), *_) = requested(engine, path, REQUESTED[path] | {"stream": True})
    assert head["status"] == 429
