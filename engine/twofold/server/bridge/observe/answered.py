"""Settings of a request and the ends of its answers, kept in its ASGI scope for spans."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from twofold.server.bridge.observe.metrics import RequestTimer

_SCOPE_KEY: Final = "twofold.answered"
SETTINGS: Final = (
    *("temperature", "top_p", "top_k", "max_tokens", "seed"),
    *("frequency_penalty", "presence_penalty", "stream"),
)
"""Sampling settings without text, by OpenTelemetry's names, which are OpenAI's."""


@dataclass(frozen=True)
class AnsweredRequest:
    """A request for generated text. Holds no prompt and no answer."""

    request_id: str
    endpoint: str
    model: str
    requested_model: str | None
    settings: Mapping[str, Any]
    timers: Sequence[RequestTimer]
    """One per answer."""
    answers_per_prompt: int


def note_answered(scope: MutableMapping[str, Any], request: AnsweredRequest) -> None:
    scope[_SCOPE_KEY] = request


def answered(scope: Mapping[str, Any]) -> AnsweredRequest | None:
    """None for a request that was refused before its fields were known."""
    found: AnsweredRequest | None = scope.get(_SCOPE_KEY)
    return found
