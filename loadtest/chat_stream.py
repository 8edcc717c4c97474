"""One streamed chat completion, read line by line: times and tokens, and everything that can be wrong with it.

No network here and no Locust: lines of server-sent events and a clock go in. TTFT is first content (or
reasoning) token − send; E2E is end of stream − send; TPOT is (E2E − TTFT) / (completion tokens − 1).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


class MalformedStreamError(Exception):
    """The server broke the protocol; the message says how."""


@dataclass(frozen=True)
class ChatResult:
    """What one user saw of one answer. Milliseconds of the user's wall clock."""

    e2e_ms: float
    ttft_ms: float | None
    """None when the answer was empty."""
    tpot_ms: float | None
    """None with fewer than two tokens."""
    completion_tokens: int
    finish_reason: str
    text: str


def read_chat_stream(
    lines: Iterable[bytes],
    sent_s: float,
    now: Callable[[], float],
    on_id: Callable[[str], None] = lambda request_id: None,
) -> ChatResult:
    """Read a stream to its end. `sent_s` and `now()` are seconds of the same clock.

    `on_id` is told what the answer calls itself as soon as it does, so also of a stream that breaks later.

    Raises MalformedStreamError for anything but well-formed chunks, one finish reason and a final [DONE].
    """
    first_s: float | None = None
    text: list[str] = []
    num_pieces = 0
    usage_tokens: int | None = None
    finish_reason: str | None = None
    named = done = False
    for line in lines:
        line = line.rstrip(b"\r\n")
        if not line or line.startswith(b":"):
            continue
        if done:
            raise MalformedStreamError(f"data after [DONE]: {line[:80]!r}")
        if not line.startswith(b"data:"):
            raise MalformedStreamError(f"a line that is not a data event: {line[:80]!r}")
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        chunk = _decode(data)
        if not named and isinstance(chunk.get("id"), str):
            named = True
            on_id(chunk["id"])
        usage_tokens = _usage_tokens(chunk, usage_tokens)
        for choice in chunk["choices"]:
            piece = _piece(choice)
            if piece:
                if first_s is None:
                    first_s = now()
                num_pieces += 1
                text.append(piece)
            if choice.get("finish_reason") is not None:
                if finish_reason is not None:
                    raise MalformedStreamError("two finish reasons in one answer")
                finish_reason = str(choice["finish_reason"])
    if finish_reason is None:
        raise MalformedStreamError("the stream ended without a finish reason")
    if not done:
        raise MalformedStreamError("the stream ended without [DONE]")
    e2e_s = now() - sent_s
    tokens = num_pieces if usage_tokens is None else usage_tokens
    ttft_s = None if first_s is None else first_s - sent_s
    tpot_s = (e2e_s - ttft_s) / (tokens - 1) if ttft_s is not None and tokens > 1 else None
    return ChatResult(
        e2e_ms=e2e_s * 1e3,
        ttft_ms=None if ttft_s is None else ttft_s * 1e3,
        tpot_ms=None if tpot_s is None else tpot_s * 1e3,
        completion_tokens=tokens,
        finish_reason=finish_reason,
        text="".join(text),
    )


def _decode(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise MalformedStreamError(f"an event that is not JSON: {data[:80]!r}") from None
    if isinstance(chunk, dict) and "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        raise MalformedStreamError(f"the server reported an error within the stream: {message}")
    if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
        raise MalformedStreamError(f"a chunk without choices: {data[:80]!r}")
    return chunk


def _usage_tokens(chunk: dict[str, Any], known: int | None) -> int | None:
    usage = chunk.get("usage")
    if usage is None:
        return known
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(tokens, int) or tokens < 0:
        raise MalformedStreamError(f"usage without completion_tokens: {usage!r:.80}")
    return tokens


def _piece(choice: Any) -> str:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        raise MalformedStreamError(f"a choice without a delta: {choice!r:.80}")
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
