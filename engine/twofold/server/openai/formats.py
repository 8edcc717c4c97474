"""Answer bodies: one class per endpoint, because OpenAI's two endpoints use different names.

An answer has one choice per prompt and `n`, numbered prompt by prompt. Extensions have the same place as in vLLM.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from twofold import __version__
from twofold.api.types import Chunk, FinishReason, TokenLogprob, Usage
from twofold.server.bridge.models.protocol import Prompt, ServingTokenizer
from twofold.server.http.errors import ApiError
from twofold.server.openai.logprobs import CompletionLogprobs, TokenNames, joined, prompt_logprobs
from twofold.server.openai.schemas import SamplingFields

TextKind = Literal["content", "reasoning"]
_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerContext:
    """The request that an answer belongs to, for its format."""

    request_id: str
    model: str
    body: SamplingFields
    prompts: Sequence[Prompt]
    tokenizer: ServingTokenizer
    reasoning_field: str = "auto"
    """Chat field that holds the thinking (`ServerConfig.reasoning_field`)."""


class AnswerFormat(ABC):
    """Bodies of one answer; `id`, `created` and `model` are the same in all of its chunks."""

    whole_object: str
    chunk_object: str
    stream_type = b"text/event-stream; charset=utf-8"
    """Content-Type of a stream."""
    stream_ping = b": ping\n\n"
    """Keep-alive bytes that clients ignore: a comment or an equivalent."""

    def __init__(self, context: AnswerContext) -> None:
        self._head = {"id": context.request_id, "created": int(time.time()), "model": context.model}
        self._context = context.body
        self._prompts = context.prompts
        self._names = TokenNames(context.tokenizer, as_ids=bool(context.body.return_tokens_as_token_ids))
        self._num_sent = [0] * self.num_choices
        """Tokens sent so far per choice of a stream."""
        self._begun = [False] * self.num_choices
        self._templates: dict[tuple[int, str], list[bytes]] = {}

    @property
    def num_choices(self) -> int:
        return len(self._prompts) * self._context.num_choices

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of choice `index`."""
        return self._prompts[index // self._context.num_choices]

    @abstractmethod
    def whole_choice(self, index: int, answer: Chunk) -> dict[str, Any]:
        """A choice of a whole answer, with its chunks joined."""

    @abstractmethod
    def first_choice(self, index: int) -> dict[str, Any] | None:
        """The first delta of a stream's choice, before the first token; None for nothing."""

    @abstractmethod
    def delta_choice(self, index: int, chunk: Chunk, *, is_first: bool) -> dict[str, Any] | None:
        """The delta of `chunk`; None for nothing. The finish reason comes in a separate chunk."""

    @abstractmethod
    def last_choice(self, index: int, reason: FinishReason) -> dict[str, Any]: ...

    def observe(self, index: int, chunk: Chunk) -> None:  # noqa: B027  most have nothing to do
        """Process a chunk of a whole answer; `whole` later gets all chunks joined."""

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        """The body of these answers, each with its chunks joined; with more than `n` per prompt, the best are
        returned."""
        usages = {index: answer.usage for index, answer in enumerate(answers) if answer.usage is not None}
        choices = [
            self.whole_choice(index, answer) | _routing_body(answer.routed_experts)
            for index, answer in enumerate(self._best(answers))
        ]
        return self._body(self.whole_object, choices) | {"usage": self._usage_body(self.total(usages))}

    def total(self, usages: Mapping[int, Usage]) -> Usage:
        """Usage of the whole request: each prompt once, all generated tokens (also those that `best_of` drops), longest
        times."""
        of_all = list(usages.values())
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._prompts),
            completion_tokens=sum(usage.completion_tokens for usage in of_all),
            prefill_s=max((usage.prefill_s for usage in of_all), default=0.0),
            decode_s=max((usage.decode_s for usage in of_all), default=0.0),
            cached_tokens=sum(
                usage.cached_tokens
                for index, usage in usages.items()
                if index % self._context.num_candidates == 0
            ),
            image_tokens=sum(prompt.image_tokens for prompt in self._prompts),
            accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in of_all),
            rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in of_all),
        )

    def _best(self, answers: Sequence[Chunk]) -> list[Chunk]:
        given, made = self._context.num_choices, self._context.num_candidates
        if given == made:
            return list(answers)
        best: list[Chunk] = []
        for start in range(0, len(answers), made):
            best += sorted(answers[start : start + made], key=_mean_logprob, reverse=True)[:given]
        return best

    def first_events(self) -> bytes:
        events = []
        for index in range(self.num_choices):
            choice = self.first_choice(index)
            if choice is not None:
                events.append(self._event([choice], self._usage_so_far(index)))
        return b"".join(events)

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Stream events of the next chunk of choice `index`."""
        if self._is_text_only and chunk.text and chunk.finish_reason is None:
            return self._text_event(index, "content", chunk.text)
        is_first, self._begun[index] = not self._begun[index], True
        self._num_sent[index] += len(chunk.token_ids)
        delta = self.delta_choice(index, chunk, is_first=is_first)
        events = [] if delta is None else [self._event([delta], self._usage_so_far(index))]
        if chunk.finish_reason is not None:
            events.append(self._last_event(index, chunk, chunk.finish_reason))
        return b"".join(events)

    def _last_event(self, index: int, chunk: Chunk, reason: FinishReason) -> bytes:
        last = self.last_choice(index, reason) | _routing_body(chunk.routed_experts)
        # Readers of the speed stop at the finish reason.
        with_usage = self._context.return_speed and chunk.usage is not None
        usage = self._usage_body(chunk.usage) if with_usage and chunk.usage else self._usage_so_far(index)
        return self._event([last], usage)

    @cached_property
    def _is_text_only(self) -> bool:
        """Whether the middle chunks of a stream differ only in their text."""
        context = self._context
        return not (self._logprobs_requested() or context.return_token_ids or context.wants_continuous_usage)

    def _text_choice(self, index: int, kind: TextKind, text: str) -> dict[str, Any] | None:
        """The choice of a text event; only chats have reasoning."""
        return self.delta_choice(index, Chunk(text, ()), is_first=False)

    def _text_event(self, index: int, kind: TextKind, text: str) -> bytes:
        """A text event. The bytes around the text are built once, because serialising JSON for every token takes ten
        times as long."""
        parts = self._templates.get((index, kind))
        if parts is None:
            mark = uuid.uuid4().hex
            choice = self._text_choice(index, kind, mark)
            assert choice is not None
            parts = self._templates[index, kind] = self._event([choice], None).split(f'"{mark}"'.encode())
        return encode_basestring(text).encode().join(parts)

    def stream_end(self, usage: Usage) -> bytes:
        """The last bytes of a stream."""
        return self.usage_event(usage) + _DONE

    def stream_error(self, error: ApiError) -> bytes:
        """The last bytes of a failed stream."""
        return error.event() + _DONE

    def ping(self, silent_s: float) -> bytes:
        """Keep-alive bytes of a stream that has been silent for `silent_s`."""
        return self.stream_ping

    def held_back(self) -> bytes:
        """Text received but not sent before the stream failed."""
        return b""

    def usage_event(self, usage: Usage) -> bytes:
        """The chunk for stream_options.include_usage; empty if not requested."""
        return self._event([], self._usage_body(usage)) if self._context.wants_usage else b""

    def _logprobs_requested(self) -> bool:
        return self._context.num_logprobs is not None

    def _prompt_logprobs(self, index: int, answer: Chunk) -> dict[str, Any]:
        """vLLM's `prompt_logprobs` of a whole answer, if requested."""
        context = self._context.prompt_logprobs
        if context is None:
            return {}
        token_ids = self.prompt_of(index).token_ids
        entries = _at_most(answer.prompt_logprobs or (), context)
        return {"prompt_logprobs": prompt_logprobs(self._names, token_ids, entries)}

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        """The usage object. Times are seconds of the run's clock. With them `prompt_tokens` counts only computed
        tokens, because readers divide the one by the other."""
        body: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if usage.image_tokens:
            body["prompt_tokens_details"]["image_tokens"] = usage.image_tokens
        if details := self._completion_details(usage):
            body["completion_tokens_details"] = details
        if self._context.return_speed:
            computed = usage.prompt_tokens - usage.cached_tokens
            body |= {
                "prompt_tokens": computed,
                "prefill_time": usage.prefill_s,
                "decode_time": usage.decode_s,
            }
        return body

    def _completion_details(self, usage: Usage) -> dict[str, int]:
        accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
        if not (accepted or rejected):
            return {}
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}

    def _usage_so_far(self, index: int) -> dict[str, float] | None:
        """Usage of one choice of a stream so far, for vLLM's continuous_usage_stats."""
        if not self._context.wants_continuous_usage:
            return None
        prompt, sent = len(self.prompt_of(index).token_ids), self._num_sent[index]
        return {"prompt_tokens": prompt, "completion_tokens": sent, "total_tokens": prompt + sent}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        body = self._body(self.chunk_object, choices)
        if usage is not None or self._context.wants_usage:
            body["usage"] = usage
        return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": kind,
            "system_fingerprint": f"twofold-{__version__}",
            "choices": choices,
        }


class CompletionFormat(AnswerFormat):
    """Answers of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    @cached_property
    def _logprobs(self) -> list[CompletionLogprobs]:
        """One per choice, as each tracks its text offset."""
        return [CompletionLogprobs(self._names) for _ in range(self.num_choices)]

    def whole_choice(self, index: int, answer: Chunk) -> dict[str, Any]:
        return {
            "index": index,
            "text": (self.prompt_of(index).text or "") + answer.text,
            "logprobs": self._logprobs_body(index, answer, with_prompt=True),
            "finish_reason": answer.finish_reason,
            **self._ids(index, answer, with_prompt=True),
            **self._prompt_logprobs(index, answer),
        }

    def first_choice(self, index: int) -> dict[str, Any] | None:
        text = self.prompt_of(index).text
        if text is None or self._logprobs_requested():
            # The prompt's log probabilities come with the first chunk, so its text does too.
            return None
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def delta_choice(self, index: int, chunk: Chunk, *, is_first: bool) -> dict[str, Any] | None:
        text = chunk.text
        logprobs_requested = self._logprobs_requested()
        if is_first and logprobs_requested:
            text = (self.prompt_of(index).text or "") + text
        logprobs = self._logprobs_body(index, chunk, with_prompt=is_first)
        ids = self._ids(index, chunk, with_prompt=is_first)
        if not text and not (chunk.token_ids and (logprobs or ids)):
            return None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, **ids}

    def last_choice(self, index: int, reason: FinishReason) -> dict[str, Any]:
        # The ids were sent by `delta_choice`: the list is empty.
        ids: dict[str, Any] = {"token_ids": []} if self._context.return_token_ids else {}
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason, **ids}

    def _logprobs_body(self, index: int, chunk: Chunk, *, with_prompt: bool) -> dict[str, Any] | None:
        context = self._context.num_logprobs
        if context is None:
            return None
        writer = self._logprobs[index]
        prompt = self.prompt_of(index)
        bodies = []
        if with_prompt and prompt.text is not None:
            entries = _at_most(chunk.prompt_logprobs or (), context)
            bodies.append(writer.of_prompt(prompt.token_ids, entries, prompt.text))
        bodies.append(writer.of_answer(chunk.logprobs))
        return joined(bodies)

    def _ids(self, index: int, chunk: Chunk, *, with_prompt: bool) -> dict[str, Any]:
        if not self._context.return_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": list(chunk.token_ids)}
        if with_prompt:
            ids["prompt_token_ids"] = list(self.prompt_of(index).token_ids)
        return ids


def joined_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one choice joined into one."""
    return chunks[-1]._replace(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
    )


def _mean_logprob(answer: Chunk) -> float:
    """Ranking value for `best_of`: mean log probability per token; 0 for an answer without tokens."""
    logprobs = [entry.logprob for entry in answer.logprobs]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def _at_most(entries: Sequence[TokenLogprob | None], num_top: int) -> list[TokenLogprob | None]:
    """`entries` without the candidates that only another field requested."""
    return [
        None if entry is None else dataclasses.replace(entry, top=entry.top[:num_top]) for entry in entries
    ]


def _routing_body(routed_experts: npt.NDArray[Any] | None) -> dict[str, str]:
    """return_routed_experts of a choice: a .npy file of shape (tokens, layers, top_k) in base64."""
    if routed_experts is None:
        return {}
    file = io.BytesIO()
    np.save(file, routed_experts, allow_pickle=False)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode("ascii")}
