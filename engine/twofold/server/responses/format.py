"""Answers in the format of /v1/responses: one object, or numbered, named events.

The chat's parsers split the answer into pieces; whole answers and streams are built by the same steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from twofold.api.types import Chunk, FinishReason, SamplingParams, TokenLogprob, Usage
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError
from twofold.server.openai.chat_format import ChatFormat
from twofold.server.openai.chat_reading import ChatReading
from twofold.server.openai.formats import AnswerContext
from twofold.server.openai.logprobs import chat_logprobs
from twofold.server.responses.input import Offer
from twofold.server.responses.items import OutputItems, StreamEvent
from twofold.server.responses.schemas import ResponsesRequest
from twofold.text.chat.events import Event


@dataclass(frozen=True)
class ResponseContext:
    """Request fields that a response repeats."""

    request: ResponsesRequest
    offer: Offer
    model: str
    defaults: SamplingParams
    effort: str | None
    """None: the template reads none."""
    keep: Callable[[dict[str, Any]], None] | None = None
    """Receives the finished response; None: it is not stored."""

    def body(self, response_id: str, created_at: int, status: str, **more: Any) -> dict[str, Any]:
        """The response object; `more` overrides its fields."""
        requested, text = self.request, self.request.text
        form = text.format if text is not None else None
        return {
            "id": response_id,
            "object": "response",
            "created_at": created_at,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "instructions": requested.instructions,
            "max_output_tokens": requested.max_output_tokens,
            "max_tool_calls": None,
            "metadata": requested.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": requested.parallel_tool_calls is not False,
            "previous_response_id": requested.previous_response_id,
            "prompt_cache_key": requested.prompt_cache_key,
            "reasoning": {
                "effort": self.effort,
                "summary": requested.reasoning.summary if requested.reasoning is not None else None,
            },
            "service_tier": "default",
            "store": self.keep is not None,
            "temperature": self.defaults.temperature
            if requested.temperature is None
            else requested.temperature,
            "text": {
                "format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"},
                "verbosity": "medium",
            },
            "tool_choice": requested.tool_choice or "auto",
            "tools": self.offer.given,
            "top_logprobs": requested.top_logprobs or 0,
            "top_p": self.defaults.top_p if requested.top_p is None else requested.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
        } | more


class EventNumbers:
    """Numbers and serialises the events of one stream."""

    def __init__(self) -> None:
        self._next = 0

    def written(self, reply: Iterable[StreamEvent]) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in reply)

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()


_MESSAGE: Final = ("content", "call_damaged")
"""Events whose text belongs to a message."""


class ResponsesFormat(ChatFormat):
    """Answers of /v1/responses."""

    def __init__(self, requested: AnswerContext, reading: ChatReading, response: ResponseContext) -> None:
        super().__init__(requested, reading)
        request = response.request
        self._response = response
        self._id = response_id(requested.request_id)
        self._created_at = int(time.time())
        self._items = OutputItems(
            response.offer,
            one_call=self._reading.one_call,
            as_summary=bool(request.reasoning and request.reasoning.summary),
            with_sealed=request.wants_encrypted_reasoning,
        )
        self._numbers = EventNumbers()
        self._reason: FinishReason | None = None
        self._kept_logprobs: list[TokenLogprob] = []
        """Log probabilities of the tokens that the parser still holds."""

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        """The response object."""
        (answer,) = answers
        usage = self.total({0: answer.usage} if answer.usage is not None else {})
        return self._kept(self._ended(usage) | {"output": self._items.whole})

    def first_events(self) -> bytes:
        """The events response.created and in_progress, with the request's fields."""
        return self._numbers.written(begin_events(self._body_now("in_progress")))

    def observe(self, index: int, chunk: Chunk) -> None:
        """Parse a chunk of a whole answer as it arrives, like a stream's."""
        for _ in self._take(chunk):
            pass

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Events of the chunk; the last chunk also ends its item."""
        return self._numbers.written(self._take(chunk))

    def _take(self, chunk: Chunk) -> Iterator[StreamEvent]:
        reply = self._parsed_events(0, chunk)
        yield from self._items.take(reply, self._text_logprobs(reply, chunk.logprobs))
        if chunk.finish_reason is not None:
            self._reason = chunk.finish_reason
            yield from self._items.end(self._status)

    def _text_logprobs(self, reply: Sequence[Event], entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Log probabilities of the tokens whose text is part of a message, without thinking, calls and end token."""
        self._kept_logprobs += entries
        if not reply:
            return []
        entries, self._kept_logprobs = self._kept_logprobs, []
        if not self._logprobs_requested() or all(event.kind not in _MESSAGE for event in reply):
            return []
        logprobs: list[dict[str, Any]] = chat_logprobs(self._names, entries)["content"]
        return logprobs

    def stream_end(self, usage: Usage) -> bytes:
        """The whole response as the final event: clients recognise the last event by its type."""
        body = self._kept(self._ended(usage))
        return self._numbers.written([(f"response.{body['status']}", {"response": body})])

    def stream_error(self, error: ApiError) -> bytes:
        """The events of a failed response."""
        reply = self._numbers.written(self._items.end("incomplete"))
        return reply + failed(self._numbers, error, self._body_now("failed"))

    def held_back(self) -> bytes:
        """Text that the parser held back as a possible mark."""
        return self._numbers.written(self._items.take(self._held_events(0)))

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _ended(self, usage: Usage) -> dict[str, Any]:
        body = self._body_now(self._status) | {"usage": self._usage(usage)}
        if self._reason == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    def _kept(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._response.keep is not None:
            self._response.keep(body | {"output": self._items.whole})
        return body

    def _body_now(self, status: str) -> dict[str, Any]:
        return self._response.body(self._id, self._created_at, status, output=self._items.items)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage, self._num_thought(usage))


def usage_body(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    if usage.image_tokens:
        details["image_tokens"] = usage.image_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def begin_events(body: dict[str, Any]) -> list[StreamEvent]:
    """The first events of a stream."""
    return [(kind, {"response": body}) for kind in ("response.created", "response.in_progress")]


def response_id(request_id: str) -> str:
    """The response's id in OpenAI's form; the logs contain it."""
    return f"resp_{request_id.rpartition('-')[2]}"


def failed(numbers: EventNumbers, error: ApiError, body: dict[str, Any]) -> bytes:
    """The events that end a failed stream: `error`, and the response, the only one that some clients read."""
    code = CONTEXT_LENGTH if error.code == CONTEXT_LENGTH else "server_error"
    why = {"code": code, "message": error.message}
    return numbers.written(
        [
            ("error", why | {"param": error.param}),
            ("response.failed", {"response": body | {"status": "failed", "error": why}}),
        ]
    )
