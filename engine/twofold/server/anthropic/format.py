"""Answers in the format of Anthropic's Messages API: content blocks, whole or as stream events.

Built from the deltas and messages of OpenAI's chat, so that additions there apply here as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Final

from twofold.api.types import Chunk, Usage
from twofold.server.anthropic.errors import anthropic_error
from twofold.server.anthropic.schemas import MessagesChat
from twofold.server.http.errors import ApiError
from twofold.server.openai.chat_format import ChatFormat
from twofold.server.openai.chat_reading import ChatReading
from twofold.server.openai.custom_tools import parsed_so_far
from twofold.server.openai.formats import AnswerContext

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_NO_CHANGE_INTERVAL_S: Final = 60.0
"""Interval of no-change events in a silent stream; a multiple of the time between two pings."""
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Delta type and field by block kind."""


class AnthropicMessage(ChatFormat):
    """Answers of /v1/messages."""

    names_reasoning = False
    stream_ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, requested: AnswerContext, reading: ChatReading) -> None:
        super().__init__(requested, reading)
        self._id = f"msg_{str(self._head['id']).rpartition('-')[2]}"
        self._is_unanswered = isinstance(self._context, MessagesChat) and self._context.generates_nothing
        self._open = ""
        """Kind of the stream's open block."""
        self._block = -1
        self._end: dict[str, Any] = {}

    # Whole answers

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        (answer,) = answers
        message, reason = self._message(0, answer)
        usage = self.total({} if answer.usage is None else {0: answer.usage})
        return self._head_of_message(self._content(message), self._usage_body(usage)) | self._ending(
            reason, answer
        )

    def _content(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._is_unanswered:
            return []
        blocks: list[dict[str, Any]] = []
        if message.get("reasoning"):
            thinking = message["reasoning"]
            blocks.append({"type": "thinking", "thinking": thinking, "signature": self._id})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            blocks.append(_tool_use(call, parsed_so_far(function["arguments"])))
        return blocks

    def _head_of_message(self, content: list[dict[str, Any]], usage: Mapping[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            # The requested name, which may be one of several.
            "model": self._context.model or self._head["model"],
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _ending(self, reason: str | None, answer: Chunk) -> dict[str, Any]:
        if answer.stopped_by is not None and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
        reply = "max_tokens" if self._is_unanswered else _REASONS.get(reason or "", reason)
        return {"stop_reason": reply, "stop_sequence": None}

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        """Prefix-cache hits are counted separately; cache writes cost nothing. Thinking is counted for models that mark
        it."""
        body: dict[str, Any] = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": 0 if self._is_unanswered else usage.completion_tokens,
        }
        if self._reading.marks.reasoning_parser is not None:
            num_thinking = 0 if self._is_unanswered else self._num_thought(usage)
            body["output_tokens_details"] = {"thinking_tokens": num_thinking}
        return body

    # Streams

    def first_events(self) -> bytes:
        """Start events. Cache hits are known only at the end, so the whole prompt counts as uncached at first."""
        usage = self._usage_body(Usage(len(self.prompt_of(0).token_ids), 0))
        return _event("message_start", {"message": self._head_of_message([], usage)}) + self.stream_ping

    def events(self, index: int, chunk: Chunk) -> bytes:
        reply = (
            b""
            if self._is_unanswered
            else b"".join(map(self._delta_event, self._deltas(index, self._parsed_events(index, chunk))))
        )
        if chunk.finish_reason is not None:
            reason = self.last_choice(index, chunk.finish_reason)["finish_reason"]
            self._end = self._ending(reason, chunk)
            reply += self._close()
        return reply

    def ping(self, silent_s: float) -> bytes:
        """Keep-alive bytes. Anthropic's client drops `ping` events, and Claude Code disconnects after minutes without
        another event. So a long silence also sends a repeatable event without changes to the message."""
        if silent_s % _NO_CHANGE_INTERVAL_S:
            return self.stream_ping
        reply = {"delta": {"stop_reason": None, "stop_sequence": None}, "usage": {"output_tokens": 0}}
        return self.stream_ping + _event("message_delta", reply)

    def held_back(self) -> bytes:
        return b"".join(map(self._delta_event, self._deltas(0, self._held_events(0))))

    def stream_end(self, usage: Usage) -> bytes:
        reply = {"delta": self._end, "usage": self._usage_body(usage)}
        return _event("message_delta", reply) + _event("message_stop", {})

    def stream_error(self, error: ApiError) -> bytes:
        _, body = anthropic_error(error)
        return _event("error", {"error": body["error"]})

    def _delta_event(self, delta: Mapping[str, Any]) -> bytes:
        """The Anthropic events of one delta of OpenAI's chat."""
        if "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            begun = self._begin("tool_use", _tool_use(call, {})) if "id" in call else b""
            return begun + self._added("tool_use", call["function"]["arguments"])
        if "reasoning" in delta:
            kind, text = "thinking", delta["reasoning"]
        else:
            kind, text = "text", delta.get("content") or ""
        if not text:
            return b""
        empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return (b"" if self._open == kind else self._begin(kind, empty)) + self._added(kind, text)

    def _begin(self, kind: str, block: Mapping[str, Any]) -> bytes:
        closed = self._close()
        self._open = kind
        self._block += 1
        return closed + _event("content_block_start", {"index": self._block, "content_block": block})

    def _added(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        name, field = _DELTAS[kind]
        # Formatted by hand: json.dumps takes several times as long, and this runs for every token.
        data = f'"index":{self._block},"delta":{{"type":"{name}","{field}":{encode_basestring(text)}}}'
        return f'event: content_block_delta\ndata: {{"type":"content_block_delta",{data}}}\n\n'.encode()

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._id}
            signed = _event("content_block_delta", {"index": self._block, "delta": delta})
        self._open = ""
        return signed + _event("content_block_stop", {"index": self._block})


def _tool_use(call: Mapping[str, Any], given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _event(kind: str, reply: Mapping[str, Any]) -> bytes:
    data = json.dumps({"type": kind} | dict(reply), ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
