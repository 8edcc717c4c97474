"""Bodies of answers: a class per endpoint, because OpenAI's two endpoints name things differently."""

from __future__ import annotations

import base64
import io
import json
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from twofold import __version__
from twofold.types import FinishReason, Usage


class AnswerFormat(ABC):
    """Bodies of one answer; `id`, `created` and `model` are the same in all of its chunks."""

    whole_object: str
    chunk_object: str

    def __init__(self, request_id: str, model: str, *, usage_wanted: bool) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._usage_wanted = usage_wanted

    @abstractmethod
    def whole_choice(self, text: str, reason: FinishReason) -> dict[str, Any]: ...

    @abstractmethod
    def first_choice(self) -> dict[str, Any] | None:
        """What a stream begins with, before the first token; None for nothing."""

    @abstractmethod
    def delta_choice(self, text: str, reason: FinishReason | None) -> dict[str, Any]: ...

    def whole(
        self, text: str, reason: FinishReason, usage: Usage, routed_experts: npt.NDArray[Any] | None = None
    ) -> dict[str, Any]:
        choice = self.whole_choice(text, reason) | _routing_body(routed_experts)
        return self._body(self.whole_object, [choice]) | {"usage": usage_body(usage)}

    def first_event(self) -> bytes:
        choice = self.first_choice()
        return b"" if choice is None else self._chunk([choice], usage=None)

    def delta_event(
        self, text: str, reason: FinishReason | None, routed_experts: npt.NDArray[Any] | None = None
    ) -> bytes:
        return self._chunk([self.delta_choice(text, reason) | _routing_body(routed_experts)], usage=None)

    def usage_event(self, usage: Usage) -> bytes:
        """The chunk that stream_options.include_usage asks for; empty when it was not asked for."""
        return self._chunk([], usage=usage) if self._usage_wanted else b""

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        body = self._body(self.chunk_object, choices)
        if self._usage_wanted:
            body["usage"] = None if usage is None else usage_body(usage)
        return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": kind,
            "system_fingerprint": f"twofold-{__version__}",
            "choices": choices,
        }


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, text: str, reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}

    def first_choice(self) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta_choice(self, text: str, reason: FinishReason | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


class CompletionFormat(AnswerFormat):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole_choice(self, text: str, reason: FinishReason) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def first_choice(self) -> None:
        return None

    def delta_choice(self, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def usage_body(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _routing_body(routed_experts: npt.NDArray[Any] | None) -> dict[str, str]:
    """What return_routed_experts adds to a choice: a .npy file of shape (tokens, layers, top_k) in base64."""
    if routed_experts is None:
        return {}
    file = io.BytesIO()
    np.save(file, routed_experts, allow_pickle=False)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode("ascii")}
