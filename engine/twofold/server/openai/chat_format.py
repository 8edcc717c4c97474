"""Answers in the format of /v1/chat/completions: text, thinking and tool calls, whole or as chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from twofold.api.types import Chunk, FinishReason, Usage
from twofold.server.openai.chat_reading import ChatReading
from twofold.server.openai.custom_tools import custom_input
from twofold.server.openai.formats import AnswerContext, AnswerFormat, TextKind
from twofold.server.openai.logprobs import chat_logprobs
from twofold.server.openai.thought_count import ThoughtCount
from twofold.text.chat.answer_parser import AnswerParser
from twofold.text.chat.events import Event

_TEXTS: Final = ("content", "reasoning")
REASONING_FIELDS: Final = ("reasoning", "reasoning_content")
"""vLLM's name, and its older one."""


class ChatFormat(AnswerFormat):
    """Answers of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    shows_custom_tools = True
    """Whether calls of custom tools have their own format; otherwise they look like function calls."""
    names_reasoning = True
    """Whether the server's setting names the field of the thinking; otherwise it is `reasoning`, for formats that are
    built from these."""

    def __init__(self, requested: AnswerContext, reading: ChatReading) -> None:
        super().__init__(requested)
        self._reading = reading
        field = requested.reasoning_field if self.names_reasoning else "reasoning"
        self._whole_fields = REASONING_FIELDS if field in ("auto", "both") else (field,)
        self._stream_fields = self._whole_fields if field != "auto" else ("reasoning",)
        self._thoughts = [ThoughtCount() for _ in range(self.num_choices)]
        self._observed: list[list[Event]] = [[] for _ in range(self.num_choices)]
        """Events of the whole answers so far."""
        self._parsers = [reading.parser(self.prompt_of(index)) for index in range(self.num_choices)]
        self._num_begun = [0] * self.num_choices
        """Tool calls begun per choice of a stream."""
        self._num_made = [0] * self.num_choices
        """Complete tool calls per choice."""
        self._custom_arguments: dict[int, list[str]] = {}
        """Argument pieces of each choice's open custom-tool call; its input is known once they are complete."""

    def observe(self, index: int, chunk: Chunk) -> None:
        """Parse a chunk of a whole answer as it arrives, like a stream's."""
        self._observed[index] += self._parsed_events(index, chunk)

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        return super().whole(answers) | self._prompt_ids() | self._prompt_logprobs(0, answers[0])

    def whole_choice(self, index: int, answer: Chunk) -> dict[str, Any]:
        message, reason = self._message(index, answer)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer),
            "finish_reason": reason,
            **self._ids(answer),
        }

    def first_choice(self, index: int) -> dict[str, Any]:
        return _choice(index, {"role": "assistant", "content": ""})

    def first_events(self) -> bytes:
        self._head |= self._prompt_ids()
        events = super().first_events()
        self._head.pop("prompt_token_ids", None)
        return events

    def events(self, index: int, chunk: Chunk) -> bytes:
        parser = self._parsers[index]
        if parser is None:
            return super().events(index, chunk)
        read = self._read(index, parser, chunk)
        if len(read) == 1 and read[0].kind in _TEXTS and self._is_text_only and chunk.finish_reason is None:
            if read[0].kind == "reasoning" and self._reading.hides_reasoning:
                return b""
            return self._text_event(index, read[0].kind, read[0].text)
        self._num_sent[index] += len(chunk.token_ids)
        deltas = list(self._deltas(index, read))
        logprobs, ids = self._logprobs(chunk), self._ids(chunk)
        if not deltas and chunk.token_ids and (logprobs or ids):
            deltas.append({"content": ""})
        events = []
        for delta in deltas:
            choice = _choice(index, delta, logprobs, **ids)
            events.append(self._event([choice], self._usage_so_far(index)))
            # Log probabilities and ids cover the whole chunk, so only its first event has them.
            logprobs, ids = None, {}
        if chunk.finish_reason is not None:
            events.append(self._last_event(index, chunk, chunk.finish_reason))
        return b"".join(events)

    def held_back(self) -> bytes:
        return b"".join(
            self._event([_choice(index, delta)], self._usage_so_far(index))
            for index in range(self.num_choices)
            for delta in self._deltas(index, self._held_events(index))
        )

    def delta_choice(self, index: int, chunk: Chunk, *, is_first: bool) -> dict[str, Any] | None:
        logprobs, ids = self._logprobs(chunk), self._ids(chunk)
        if not chunk.text and not (chunk.token_ids and (logprobs or ids)):
            return None
        return _choice(index, {"content": chunk.text}, logprobs, **ids)

    def last_choice(self, index: int, reason: FinishReason) -> dict[str, Any]:
        reply = "tool_calls" if reason == "stop" and self._num_made[index] else reason
        ids: dict[str, Any] = {"token_ids": []} if self._context.return_token_ids else {}
        return _choice(index, {}, **ids) | {"finish_reason": reply}

    def _message(self, index: int, answer: Chunk) -> tuple[dict[str, Any], str | None]:
        """A whole answer's message and finish reason."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if self._parsers[index] is None:
            return message, answer.finish_reason
        texts = {"content": "", "reasoning": ""}
        calls: dict[int, dict[str, Any]] = {}
        for event in self._observed[index]:
            if event.kind == "call":
                calls[event.number] = _call(event) | {"function": {"name": event.text, "arguments": ""}}
            elif event.kind == "arguments":
                calls[event.number]["function"]["arguments"] += event.text
            elif event.kind == "call_damaged":
                del calls[event.number]
                texts["content"] += event.text
            elif event.kind in texts:
                texts[event.kind] += event.text
        made = [self._shown(call) for call in calls.values()][: 1 if self._reading.one_call else None]
        message["content"] = texts["content"] or (None if made else "")
        if self._reading.marks.reasoning_parser is not None:
            thinking = None if self._reading.hides_reasoning else texts["reasoning"] or None
            message |= dict.fromkeys(self._whole_fields, thinking)
        if made:
            message["tool_calls"] = made
        return message, "tool_calls" if made and answer.finish_reason == "stop" else answer.finish_reason

    def _is_custom(self, name: str) -> bool:
        return self.shows_custom_tools and name in self._reading.custom_tools

    def _shown(self, call: dict[str, Any]) -> dict[str, Any]:
        """A complete call in the format of its tool."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not self._is_custom(name):
            return call
        return {
            "id": call["id"],
            "type": "custom",
            "custom": {"name": name, "input": custom_input(arguments)},
        }

    def _text_choice(self, index: int, kind: TextKind, text: str) -> dict[str, Any] | None:
        (delta,) = self._deltas(index, [Event(kind, text)])
        return _choice(index, delta)

    def _parsed_events(self, index: int, chunk: Chunk) -> list[Event]:
        """Parsed events of a choice's chunk; without a parser, all of it is text."""
        parser = self._parsers[index]
        if parser is not None:
            return self._read(index, parser, chunk)
        return [Event("content", chunk.text)] if chunk.text else []

    def _held_events(self, index: int) -> list[Event]:
        """Events that the parser held back as a possible mark."""
        parser = self._parsers[index]
        return parser.finish() if parser is not None else []

    def _read(self, index: int, parser: AnswerParser, chunk: Chunk) -> list[Event]:
        events = parser.push(chunk.text)
        if chunk.finish_reason is not None:
            events += parser.finish(
                cuts_calls=self._reading.forces_a_call and chunk.finish_reason == "length"
            )
        if self._reading.marks.reasoning_parser is None:
            # harmony's marks separate thinking even when no parser was asked for.
            events = [
                event._replace(kind="content") if event.kind == "reasoning" else event for event in events
            ]
        self._thoughts[index].add(events, len(chunk.token_ids))
        return events

    def _completion_details(self, usage: Usage) -> dict[str, int]:
        details = super()._completion_details(usage)
        if self._reading.marks.reasoning_parser is None:
            return details
        return {"reasoning_tokens": self._num_thought(usage)} | details

    def _num_thought(self, usage: Usage) -> int:
        """Tokens of thinking in all answers."""
        return min(sum(count.num_tokens for count in self._thoughts), usage.completion_tokens)

    def _deltas(self, index: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Message deltas of the events of a stream.

        A call that proves damaged after it has begun cannot be taken back: all of it is sent as text, and the finish
        reason is not that of a call.
        """
        for event in events:
            if (
                event.kind in ("call", "arguments", "call_end")
                and self._reading.one_call
                and self._num_made[index]
            ):
                continue
            if event.kind in ("content", "call_damaged"):
                self._custom_arguments.pop(index, None)
                yield {"content": event.text}
            elif event.kind == "reasoning":
                if not self._reading.hides_reasoning:
                    yield dict.fromkeys(self._stream_fields, event.text)
            elif event.kind == "call":
                yield self._begun_call(index, event)
            elif event.kind == "arguments" and index in self._custom_arguments:
                self._custom_arguments[index].append(event.text)
            elif event.kind == "arguments":
                yield self._in_call(index, {"function": {"arguments": event.text}})
            elif event.kind == "call_end":
                self._num_made[index] += 1
                if index in self._custom_arguments:
                    reply = custom_input("".join(self._custom_arguments.pop(index)))
                    yield self._in_call(index, {"custom": {"input": reply}})

    def _begun_call(self, index: int, event: Event) -> dict[str, Any]:
        self._num_begun[index] += 1
        if self._is_custom(event.text):
            self._custom_arguments[index] = []
            custom = {"name": event.text, "input": ""}
            return self._in_call(index, {"id": event.call_id, "type": "custom", "custom": custom})
        return self._in_call(index, _call(event) | {"function": {"name": event.text, "arguments": ""}})

    def _in_call(self, index: int, reply: dict[str, Any]) -> dict[str, Any]:
        """A delta of the open call of choice `index`."""
        return {"tool_calls": [{"index": self._num_begun[index] - 1, **reply}]}

    def _logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        return chat_logprobs(self._names, chunk.logprobs) if self._logprobs_requested() else None

    def _ids(self, chunk: Chunk) -> dict[str, Any]:
        return {"token_ids": list(chunk.token_ids)} if self._context.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        ids = self._prompts[0].token_ids
        return {"prompt_token_ids": list(ids)} if self._context.return_token_ids else {}


def _call(event: Event) -> dict[str, Any]:
    return {"id": event.call_id, "type": "function"}


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A choice of a stream's chunk before the last."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **more}
