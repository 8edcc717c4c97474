"""Answers in Ollama's form: lines of JSON instead of events, durations in nanoseconds.

Made from the choices of OpenAI's formats, so that whatever those learn to say is said here as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from twofold.api.types import Chunk
from twofold.chat.events import Event
from twofold.server.api_errors import ApiError
from twofold.server.chat_format import ChatFormat
from twofold.server.formats import AnswerFormat, CompletionFormat


class _OllamaLines(AnswerFormat):
    """`return_speed` is on in what it answers: the last line says how long prompt and answer took."""

    stream_type = b"application/x-ndjson"
    # Clients parse every line, so there is none that they would read over.
    stream_probe = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begun_s = time.perf_counter()
        self._created_at = now()

    def first_events(self) -> bytes:
        return b""

    def stream_end(self, _usage: Any) -> bytes:
        return b""

    def stream_error(self, error: ApiError) -> bytes:
        return _line({"error": error.message})

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        body = super().whole(answers)
        return self._said(body["choices"][0], body["usage"])

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, float] | None) -> bytes:
        return _line(self._said(choices[0], usage))

    def _said(self, choice: Mapping[str, Any], usage: Mapping[str, float] | None) -> dict[str, Any]:
        """One line; the last one, which has the finish reason, with the counts and durations."""
        reason = choice.get("finish_reason")
        head = {"model": self._head["model"], "created_at": self._created_at}
        said = head | self._content(choice) | {"done": reason is not None}
        if reason is None or usage is None:
            return said
        return said | {
            # Ollama has no reason of its own for calls.
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": _nanoseconds(time.perf_counter() - self._begun_s),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(usage["prefill_time"]),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(usage["decode_time"]),
        }

    def _content(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        raise AssertionError("each endpoint has its own")


class OllamaChat(_OllamaLines, ChatFormat):
    """/api/chat."""

    _call = Event("call")
    _arguments = ""

    def _deltas(self, index: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Clients know whole calls only: each comes when it is complete."""
        for event in events:
            deltas = list(super()._deltas(index, [event]))
            if event.kind == "call":
                self._call, self._arguments = event, ""
            elif event.kind == "arguments":
                self._arguments += event.text
            elif event.kind == "call_end":
                function = {"name": self._call.text, "arguments": self._arguments}
                yield {"tool_calls": [{"id": self._call.call_id, "function": function}]}
            else:
                yield from deltas

    def _content(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        said = choice.get("delta") or choice.get("message") or {}
        message = {"role": "assistant"} | text_of(choice, "content")
        if said.get("tool_calls"):
            message["tool_calls"] = [_call(call) for call in said["tool_calls"]]
        return {"message": message}


class OllamaGenerate(_OllamaLines, ChatFormat):
    """/api/generate, whose prompt is a conversation's only message."""

    def _content(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return text_of(choice, "response")


class OllamaRaw(_OllamaLines, CompletionFormat):
    """/api/generate with `raw`."""

    def _content(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {"response": choice["text"]}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def text_of(choice: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Text and thinking of a choice of OpenAI's chat, whole or of a stream; the text by `name`."""
    said = choice.get("delta") or choice.get("message") or {}
    thinking = said.get("reasoning_content")
    return {name: said.get("content") or ""} | ({"thinking": thinking} if thinking else {})


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object there."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {"id": call["id"], "function": {"name": name, "arguments": json.loads(arguments or "{}")}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
