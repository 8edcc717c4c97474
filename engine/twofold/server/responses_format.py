"""Answers in the form of /v1/responses: one object, or events that are numbered and named.

What the answer is made of, the chat's parsers say; whole answers and streams are built by the same steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twofold.api.types import Chunk, FinishReason, SamplingParams, Usage
from twofold.chat.events import Event
from twofold.server.api_errors import CONTEXT_LENGTH, ApiError
from twofold.server.chat_format import ChatFormat
from twofold.server.chat_reading import ChatReading
from twofold.server.prompts import Prompt
from twofold.server.protocol import ServingTokenizer
from twofold.server.responses_input import Offer
from twofold.server.responses_items import OutputItems, Said
from twofold.server.responses_schemas import ResponsesRequest
from twofold.server.schemas import SamplingFields


@dataclass(frozen=True)
class AskedResponse:
    """What a response repeats of its request."""

    request: ResponsesRequest
    offer: Offer
    model: str
    defaults: SamplingParams
    effort: str | None
    """None: the template reads none."""

    def body(self, response_id: str, created_at: int, status: str, **more: Any) -> dict[str, Any]:
        """The response object; `more` stands over what is said otherwise."""
        asked, text = self.request, self.request.text
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
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {
                "effort": self.effort,
                "summary": asked.reasoning.summary if asked.reasoning is not None else None,
            },
            "service_tier": "default",
            "store": False,
            "temperature": self.defaults.temperature if asked.temperature is None else asked.temperature,
            "text": {
                "format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"},
                "verbosity": "medium",
            },
            "tool_choice": asked.tool_choice or "auto",
            "tools": self.offer.given,
            "top_logprobs": 0,
            "top_p": self.defaults.top_p if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
        } | more


class EventNumbers:
    """Writes the events of one stream."""

    def __init__(self) -> None:
        self._next = 0

    def written(self, said: Iterable[Said]) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in said)

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()


class ResponsesFormat(ChatFormat):
    """/v1/responses."""

    def __init__(
        self,
        request_id: str,
        model: str,
        asked: SamplingFields,
        prompts: Sequence[Prompt],
        tokenizer: ServingTokenizer,
        reading: ChatReading,
        response: AskedResponse,
    ) -> None:
        super().__init__(request_id, model, asked, prompts, tokenizer, reading)
        request = response.request
        self._response = response
        self._id = response_id(request_id)
        self._created_at = int(time.time())
        self._items = OutputItems(
            response.offer,
            one_call=self._reading.one_call,
            as_summary=bool(request.reasoning and request.reasoning.summary),
            with_sealed=request.wants_encrypted_reasoning,
        )
        self._numbers = EventNumbers()
        self._reason: FinishReason | None = None
        self._num_thought = 0
        self._thinks, self._num_unsure = False, 0
        """Whether the last text was thinking, and tokens since then, whose text the parser still keeps."""

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        """The response object."""
        (answer,) = answers
        usage = self.total({0: answer.usage} if answer.usage is not None else {})
        return self._ended(usage) | {"output": self._items.whole}

    def first_events(self) -> bytes:
        """The response as it was asked for, and that it has begun."""
        body = self._body_now("in_progress")
        return self._numbers.written(
            [("response.created", {"response": body}), ("response.in_progress", {"response": body})]
        )

    def saw(self, index: int, chunk: Chunk) -> None:
        """The whole answer is read as it comes, as a stream's is."""
        for _ in self._take(chunk):
            pass

    def events(self, index: int, chunk: Chunk) -> bytes:
        """What the chunk adds; with the last one its item ends."""
        return self._numbers.written(self._take(chunk))

    def _take(self, chunk: Chunk) -> Iterator[Said]:
        said = self._said_by(0, chunk)
        self._count(said, len(chunk.token_ids))
        yield from self._items.take(said)
        if chunk.finish_reason is not None:
            self._reason = chunk.finish_reason
            yield from self._items.end(self._status)

    def _count(self, said: Sequence[Event], num_tokens: int) -> None:
        """Tokens whose text is thinking; what the parser kept belongs to what follows, marks to neither."""
        if any(event.kind == "reasoning" for event in said):
            self._num_thought += self._num_unsure + num_tokens
        if said:
            self._thinks, self._num_unsure = said[-1].kind == "reasoning", 0
        elif self._thinks:
            self._num_unsure += num_tokens

    def stream_end(self, usage: Usage) -> bytes:
        """The whole response. Nothing follows: it is by its type that clients know the last event."""
        body = self._ended(usage)
        return self._numbers.written([(f"response.{body['status']}", {"response": body})])

    def stream_error(self, error: ApiError) -> bytes:
        """The response has failed."""
        said = self._numbers.written(self._items.end("incomplete"))
        return said + failed(self._numbers, error, self._body_now("failed"))

    def held_back(self) -> bytes:
        """What the parser kept as it might have become a mark."""
        return self._numbers.written(self._items.take(self._kept(0)))

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _ended(self, usage: Usage) -> dict[str, Any]:
        body = self._body_now(self._status) | {"usage": self._usage(usage)}
        if self._reason == "length":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    def _body_now(self, status: str) -> dict[str, Any]:
        return self._response.body(self._id, self._created_at, status, output=self._items.items)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage, min(self._num_thought, usage.completion_tokens))


def usage_body(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_id(request_id: str) -> str:
    """By which it is found in the logs, in OpenAI's form."""
    return f"resp_{request_id.rpartition('-')[2]}"


def failed(numbers: EventNumbers, error: ApiError, body: dict[str, Any]) -> bytes:
    """What ends a stream: `error`, and the response, which some clients look at alone."""
    code = CONTEXT_LENGTH if error.code == CONTEXT_LENGTH else "server_error"
    why = {"code": code, "message": error.message}
    return numbers.written(
        [
            ("error", why | {"param": error.param}),
            ("response.failed", {"response": body | {"status": "failed", "error": why}}),
        ]
    )
