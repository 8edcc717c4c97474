"""Parses a streamed answer line by line: arrival times of its pieces, and all protocol errors.

No network and no clock here: input is lines of server-sent events and their times. TTFT is first content (or reasoning)
token − send, E2EL end of stream − send, TPOT (E2EL − TTFT) / (completion tokens − 1), ITL the gaps between pieces.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Any


class MalformedStreamError(Exception):
    """The server violated the protocol, or reported an error within the stream; the message has the details."""

    def __init__(self, message: str, kind: str = "malformed stream") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class AnswerStream:
    """The answer received so far. Times are seconds of the reader's clock."""

    sent_s: float
    request_id: str | None = None
    """The answer's id."""
    pieces: list[str] = field(default_factory=list)
    piece_s: MutableSequence[float] = field(default_factory=lambda: array("d"))
    """Arrival time of each piece of text or of a tool call; pieces that arrived together have the same time."""
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Calls by their index, as a message of the assistant holds them."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens from the server's prefix cache; None if not reported."""
    finish_reason: str | None = None
    end_s: float | None = None
    """When [DONE] came."""
    _usage_tokens: int | None = None
    _kept: list[tuple[bytes, float]] = field(default_factory=list)

    def sent(self, now_s: float) -> None:
        """Count from now: the request waited for the client's own event loop and connection before."""
        self.sent_s = now_s

    def keep(self, line: bytes, now_s: float) -> None:
        """Take the next line and parse it later: parsing now would delay the reading of other streams."""
        self._kept.append((line, now_s))

    def parse(self) -> None:
        """Process the lines that were kept. Errors as for `line`; the lines after an error are dropped."""
        kept, self._kept = self._kept, []
        for line, now_s in kept:
            self.line(line, now_s)

    def first_error(self, error: Exception) -> Exception:
        """What went wrong first when reading failed with `error`: that, or a kept line."""
        try:
            self.parse()
        except MalformedStreamError as earlier:
            return earlier
        return error

    def line(self, line: bytes, now_s: float) -> None:
        """Process the next line. MalformedStreamError for anything but well-formed chunks and one finish reason."""
        line = line.rstrip(b"\r\n")
        if not line or line.startswith(b":"):
            return
        if self.end_s is not None:
            raise MalformedStreamError(f"data after [DONE]: {line[:80]!r}")
        if not line.startswith(b"data:"):
            raise MalformedStreamError(f"a line that is not a data event: {line[:80]!r}")
        data = line[5:].strip()
        if data == b"[DONE]":
            self.end_s = now_s
            return
        chunk = _decode(data)
        if self.request_id is None and isinstance(chunk.get("id"), str):
            self.request_id = chunk["id"]
        self._take_usage(chunk.get("usage"))
        for choice in chunk["choices"]:
            piece = _piece(choice)
            if piece:
                self.pieces.append(piece)
            if self._take_calls(choice) or piece:
                self.piece_s.append(now_s)
            if choice.get("finish_reason") is not None:
                if self.finish_reason is not None:
                    raise MalformedStreamError("two finish reasons in one answer")
                self.finish_reason = str(choice["finish_reason"])

    def end(self) -> None:
        """End of the connection. MalformedStreamError unless the answer is complete."""
        self.parse()
        if self.finish_reason is None:
            raise MalformedStreamError("the stream ended without a finish reason")
        if self.end_s is None:
            raise MalformedStreamError("the stream ended without [DONE]")

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def completion_tokens(self) -> int:
        """From `usage`; without it, the number of pieces."""
        return len(self.piece_s) if self._usage_tokens is None else self._usage_tokens

    @property
    def ttft_ms(self) -> float | None:
        """None when the answer was empty."""
        return (self.piece_s[0] - self.sent_s) * 1e3 if self.piece_s else None

    @property
    def e2el_ms(self) -> float | None:
        """None before the end."""
        return None if self.end_s is None else (self.end_s - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """None with fewer than two tokens, or before the end."""
        if self.ttft_ms is None or self.e2el_ms is None or self.completion_tokens < 2:
            return None
        return (self.e2el_ms - self.ttft_ms) / (self.completion_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.piece_s, self.piece_s[1:], strict=False)]

    def _take_calls(self, choice: Any) -> bool:
        """Add the choice's pieces of tool calls; whether there were any."""
        delta = choice.get("delta") if isinstance(choice, dict) else None
        pieces = delta.get("tool_calls") if isinstance(delta, dict) else None
        for piece in pieces or ():
            function = piece.get("function") if isinstance(piece, dict) else None
            if not isinstance(function, dict):
                raise MalformedStreamError(f"a tool call without a function: {piece!r:.80}")
            call = self.tool_calls.setdefault(
                int(piece.get("index") or 0),
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] = piece.get("id") or call["id"]
            for name in ("name", "arguments"):
                call["function"][name] += function.get(name) or ""
        return bool(pieces)

    def _take_usage(self, usage: Any) -> None:
        if usage is None:
            return
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not isinstance(tokens, int) or tokens < 0:
            raise MalformedStreamError(f"usage without completion_tokens: {usage!r:.80}")
        self._usage_tokens = tokens
        self.prompt_tokens = _count(usage, "prompt_tokens")
        self.cached_tokens = _count(usage.get("prompt_tokens_details"), "cached_tokens")


def _decode(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedStreamError(f"an event that is not JSON: {data[:80]!r}") from None
    if isinstance(chunk, dict) and "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        raise MalformedStreamError(
            f"the server reported an error within the stream: {message}", "error within the stream"
        )
    if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
        raise MalformedStreamError(f"a chunk without choices: {data[:80]!r}")
    return chunk


def _piece(choice: Any) -> str:
    """The text of a choice, for either endpoint."""
    if isinstance(choice, dict) and isinstance(choice.get("text"), str):
        return str(choice["text"])
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        raise MalformedStreamError(f"a choice without a delta: {choice!r:.80}")
    piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    if not isinstance(piece, str):
        raise MalformedStreamError(f"a piece that is no text: {piece!r:.80}")
    return piece


def _count(holder: Any, name: str) -> int | None:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, int) else None
