"""Answers in Ollama's format: JSON lines instead of events, durations in nanoseconds.

Built from the choices of OpenAI's formats, so that additions there apply here as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from twofold.api.types import Chunk
from twofold.server.http.errors import ApiError
from twofold.server.openai.chat_format import ChatFormat
from twofold.server.openai.formats import AnswerFormat, CompletionFormat
from twofold.server.openai.logprobs import chat_logprobs
from twofold.text.chat.events import Event


class _OllamaLines(AnswerFormat):
    """Base of Ollama's formats. Their requests set `return_speed`: the last line has the prompt and answer
    durations."""

    stream_type = b"application/x-ndjson"
    # Whitespace before a line, where JSON allows it; an empty line would be parsed.
    stream_ping = b" "
    shows_custom_tools = False
    names_reasoning = False

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
        return self._answer_event(body["choices"][0], body["usage"])

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, float] | None) -> bytes:
        return _line(self._answer_event(choices[0], usage))

    def _answer_event(self, choice: Mapping[str, Any], usage: Mapping[str, float] | None) -> dict[str, Any]:
        """One line; the last one has the finish reason, counts and durations."""
        reason = choice.get("finish_reason")
        head = {"model": self._head["model"], "created_at": self._created_at}
        reply = head | self._content(choice) | {"done": reason is not None}
        if choice.get("logprobs"):
            reply["logprobs"] = choice["logprobs"]["content"]
        if reason is None or usage is None:
            return reply
        return reply | {
            # Ollama has no finish reason for tool calls.
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": _nanoseconds(time.perf_counter() - self._begun_s),
            "load_duration": 0,
            "prompt_eval_count": usage["total_tokens"] - usage["completion_tokens"],
            "prompt_eval_duration": _nanoseconds(usage["prefill_time"]),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(usage["decode_time"]),
        }

    def _content(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        raise AssertionError("each endpoint has its own")


class OllamaChat(_OllamaLines, ChatFormat):
    """Answers of /api/chat."""

    _call = Event("call")
    _arguments = ""

    def _deltas(self, index: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Deltas with whole calls only, as clients expect: each is sent when it is complete."""
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
        reply = choice.get("delta") or choice.get("message") or {}
        message = {"role": "assistant"} | text_of(choice, "content")
        if reply.get("tool_calls"):
            message["tool_calls"] = [_call(call) for call in reply["tool_calls"]]
        return {"message": message}


class OllamaGenerate(_OllamaLines, ChatFormat):
    """Answers of /api/generate, whose prompt is a conversation's only message, or the next one if `context` was
    sent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._answer_ids: list[int] = []

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        self._answer_ids += answers[0].token_ids
        return super().whole(answers)

    def events(self, index: int, chunk: Chunk) -> bytes:
        self._answer_ids += chunk.token_ids
        return super().events(index, chunk)

    def _answer_event(self, choice: Mapping[str, Any], usage: Mapping[str, float] | None) -> dict[str, Any]:
        reply = super()._answer_event(choice, usage)
        if reply["done"]:
            reply["context"] = [*self.prompt_of(0).token_ids, *self._answer_ids]
        return reply

    def _content(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return text_of(choice, "response")


class OllamaRaw(_OllamaLines, CompletionFormat):
    """Answers of /api/generate with `raw`, which returns no context in Ollama either."""

    def _logprobs_body(self, index: int, chunk: Chunk, *, with_prompt: bool) -> dict[str, Any] | None:
        return chat_logprobs(self._names, chunk.logprobs) if self._logprobs_requested() else None

    def _content(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {"response": choice["text"]}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def text_of(choice: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Text and thinking of a choice of OpenAI's chat, whole or streamed; the text under the key `name`."""
    reply = choice.get("delta") or choice.get("message") or {}
    thinking = reply.get("reasoning")
    return {name: reply.get("content") or ""} | ({"thinking": thinking} if thinking else {})


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in Ollama's format: its arguments are an object."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {"id": call["id"], "function": {"name": name, "arguments": json.loads(arguments or "{}")}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
