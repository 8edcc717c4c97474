"""Answers in llama.cpp's format, built from OpenAI's choices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twofold.api.types import Chunk, Usage
from twofold.server.llama_cpp.answer_schemas import Timings
from twofold.server.openai.formats import AnswerContext, CompletionFormat


class InfillFormat(CompletionFormat):
    """Answers of /infill. Their requests set `return_speed`."""

    _is_text_only = False
    """Each event counts its tokens."""

    def __init__(self, requested: AnswerContext, *, response_fields: Sequence[str] = ()) -> None:
        super().__init__(requested)
        self._response_fields = response_fields
        self._stopped_by: str | None = None

    def whole(self, answers: Sequence[Chunk]) -> dict[str, Any]:
        self._stopped_by = answers[0].stopped_by
        body = super().whole(answers)
        return self._last(body["choices"][0], body["usage"])

    def events(self, index: int, chunk: Chunk) -> bytes:
        self._stopped_by = chunk.stopped_by
        return super().events(index, chunk)

    def stream_end(self, usage: Usage) -> bytes:
        return b""

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        choice = choices[0]
        is_last = choice["finish_reason"] is not None and usage is not None
        reply = self._last(choice, usage or {}) if is_last else self._answer_event(choice, self._num_sent[0])
        return b"data: " + json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _answer_event(self, choice: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        return {
            "index": 0,
            "content": choice["text"],
            "tokens": [],
            "stop": choice["finish_reason"] is not None,
            "id_slot": -1,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": len(self.prompt_of(0).token_ids),
        }

    def _last(self, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer, or the last event of a stream."""
        ends = "limit" if choice["finish_reason"] == "length" else "word" if self._stopped_by else "eos"
        reply = self._answer_event(choice, usage["completion_tokens"]) | {
            "model": self._head["model"],
            "truncated": False,
            "stop_type": ends,
            "stopping_word": self._stopped_by or "",
            "tokens_cached": usage["total_tokens"],
            "timings": _timings(usage),
        }
        if not self._response_fields:
            return reply
        values = {path: _value_at(reply, path) for path in self._response_fields}
        return {path: value for path, value in values.items() if value is not None}


def _timings(usage: Mapping[str, Any]) -> Timings:
    prompt_n, prompt_ms = usage["prompt_tokens"], 1e3 * usage["prefill_time"]
    predicted_n, predicted_ms = usage["completion_tokens"], 1e3 * usage["decode_time"]
    return {
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _quotient(prompt_ms, prompt_n),
        "prompt_per_second": 1e3 * _quotient(prompt_n, prompt_ms),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _quotient(predicted_ms, predicted_n),
        "predicted_per_second": 1e3 * _quotient(predicted_n, predicted_ms),
    }


def _quotient(value: float, by: float) -> float:
    return value / by if by else 0.0


def _value_at(reply: Mapping[str, Any], path: str) -> Any:
    """The value at "timings/prompt_n"; None: there is none."""
    found: Any = reply
    for name in path.split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found
