"""One streamed request over a socket of its own, with as little client as possible: the server is what is timed."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TimedAnswer:
    """What came back. Moments are `time.perf_counter()` seconds."""

    status: int
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    """When each event with text arrived; events that arrived together have the same moment."""
    completion_tokens: int = 0
    finish_reason: str | None = None
    complete: bool = False
    """The stream ended as the protocol says."""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.sent_s if self.token_s else None


async def post(port: int, path: str, body: bytes, *, stop_after: int | None = None) -> TimedAnswer:
    """POST `body` to 127.0.0.1 and read the answer, streamed or not.

    stop_after: hang up after so many events with text, as a client does that lost interest; 0: before the first.

    Raises:
        OSError: no connection, or it was reset.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        answer = TimedAnswer(0, time.perf_counter())
        writer.write(head.encode() + body)
        await writer.drain()
        status_line = await reader.readline()
        answer.status = int(status_line.split()[1]) if status_line else 0
        while (await reader.readline()).strip():
            pass
        if answer.status != 200:
            answer.error = (await reader.read(1 << 16)).decode(errors="replace")
            return answer
        await _read_events(reader, answer, stop_after)
        return answer
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, answer: TimedAnswer, stop_after: int | None) -> None:
    while stop_after is None or len(answer.token_s) < stop_after:
        line = await reader.readline()
        if not line:
            return
        if not line.startswith(b"data:"):
            continue
        now, data = time.perf_counter(), line[5:].strip()
        if data == b"[DONE]":
            answer.complete = answer.error is None and answer.finish_reason is not None
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            answer.error = json.dumps(event["error"])
            continue
        if event.get("usage"):
            answer.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            if choice.get("delta", {}).get("content") or choice.get("text"):
                answer.token_s.append(now)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


async def get(port: int, path: str) -> tuple[int, str]:
    """(status, body) of a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        raw = await reader.read()
    finally:
        writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()
