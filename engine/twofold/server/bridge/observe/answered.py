"""Settings of a request and the ends of its answers, kept in its ASGI scope for spans and the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from twofold.api.types import Usage
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
    expert_hit_rate: Callable[[], float | None] = lambda: None
    """Share of routed experts that were in a slot since the request began; None without slots or routed experts."""

    @property
    def usages(self) -> list[Usage]:
        """Counts of the answers that have ended, in order."""
        return [timer.usage for timer in self.timers if timer.usage is not None]

    @property
    def prompts(self) -> list[Usage]:
        """One of `usages` for each prompt: the answers to one prompt share its tokens."""
        return self.usages[:: self.answers_per_prompt]

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token of any answer; None before it."""
        return min((timer.ttft_s for timer in self.timers if timer.ttft_s is not None), default=None)


def note_answered(scope: MutableMapping[str, Any], request: AnsweredRequest) -> None:
    scope[_SCOPE_KEY] = request


def answered(scope: Mapping[str, Any]) -> AnsweredRequest | None:
    """None for a request that was refused before its fields were known."""
    found: AnsweredRequest | None = scope.get(_SCOPE_KEY)
    return found
