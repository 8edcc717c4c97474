"""One request inside the engine: what it may ask, and its answer as it grows.

`Answer` joins a scheduled sequence with its sampler, its text and its times. Times are seconds of the run's clock
unless named `*_unix_s`.
"""

from __future__ import annotations

import math
import time
from typing import Any

from twofold.errors import RequestError
from twofold.sampler import Sampler
from twofold.scheduler import Sequence
from twofold.text_stream import Detokenizer, TextStream
from twofold.types import Clock, FinishReason, GenerationRequest, RequestRecord, SamplingParams, Usage

# name → (lowest, highest, whether the lowest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (0, 2**31, True),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.01, 100.0, True),
}


def check_request(request: GenerationRequest, vocab_size: int, max_context: int) -> None:
    """Refuse what can never be served. Raises RequestError that names the parameter."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if len(prompt) >= max_context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; the context holds {max_context} with the answer. Shorten the prompt",
            param="prompt",
        )
    worst = max(prompt) if min(prompt) >= 0 else min(prompt)
    if not 0 <= worst < vocab_size:
        raise RequestError(f"token id {worst} is outside the vocabulary of {vocab_size}", param="prompt")
    check_sampling(request.sampling)


def check_sampling(sampling: SamplingParams) -> None:
    """Raises RequestError naming the parameter, its value and its range."""
    for name, (low, high, low_allowed) in _RANGES.items():
        _check_range(name, getattr(sampling, name), low, high, low_allowed)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise RequestError(f"max_tokens is {sampling.max_tokens}; it must be 1 or more", param="max_tokens")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**64:
        raise RequestError(f"seed is {sampling.seed}; it must be from 0 to 2^64-1", param="seed")


def _check_range(name: str, value: Any, low: float, high: float, low_allowed: bool) -> None:
    if not math.isfinite(value) or not (low <= value if low_allowed else low < value) or value > high:
        edge = f"{low:g}" if low_allowed else f"above {low:g}"
        raise RequestError(f"{name} is {value}; it must be from {edge} to {high:g}", param=name)


def max_answer_tokens(request: GenerationRequest, max_context: int) -> int:
    """Tokens the answer may have: what was asked for, cut to what the context leaves."""
    room = max_context - len(request.prompt_token_ids)
    wanted = request.sampling.max_tokens
    return room if wanted is None else min(wanted, room)


class Answer:
    """The answer to one request while it grows. Owned by the engine's thread after submission."""

    def __init__(
        self, sequence: Sequence, detokenizer: Detokenizer, default_seed: int | None, now: float
    ) -> None:
        request = sequence.request
        self.sequence = sequence
        self.sampler = Sampler(request.sampling, request.prompt_token_ids, default_seed)
        self._text = TextStream(detokenizer, request.sampling.stop)
        self._num_sent = sequence.num_prompt_tokens
        self._submitted = now
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._finished: float | None = None
        self._finish_reason: FinishReason | None = None
        self._submitted_unix_s = time.time()
        self._first_token_unix_s: float | None = None
        self._finished_unix_s: float | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self._text.stopped

    def scheduled(self, now: float) -> None:
        """The request takes part in a step; only the first one ends its time in the queue."""
        if self._scheduled is None:
            self._scheduled = now

    def push(self, token: int, now: float, *, hidden: bool) -> str:
        """Append a token; returns text that may be shown. `hidden` tokens (end of text) have none."""
        self.sequence.token_ids.append(token)
        if self._first_token is None:
            self._first_token, self._first_token_unix_s = now, time.time()
        return "" if hidden else self._text.push(token)

    def flush(self) -> str:
        """Text that was held back until now."""
        return self._text.flush()

    def take_unsent(self) -> tuple[int, ...]:
        """Tokens that no chunk has carried yet."""
        unsent = tuple(self.sequence.token_ids[self._num_sent :])
        self._num_sent = len(self.sequence.token_ids)
        return unsent

    def finish(self, reason: FinishReason, now: float, clock: Clock) -> Usage:
        self._finished, self._finish_reason, self._finished_unix_s = now, reason, time.time()
        queue_s, prefill_s, decode_s = self._durations()
        return Usage(
            prompt_tokens=self.sequence.num_prompt_tokens,
            completion_tokens=self.sequence.num_generated,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            clock=clock,
        )

    def record(self) -> RequestRecord:
        """The request as telemetry keeps it, at its present state."""
        request = self.sequence.request
        queue_s, prefill_s, decode_s = self._durations()
        return RequestRecord(
            number=self.sequence.number,
            request_id=request.request_id,
            endpoint=request.endpoint,
            submitted_s=self._submitted_unix_s,
            first_token_s=self._first_token_unix_s,
            finished_s=self._finished_unix_s,
            prompt_tokens=self.sequence.num_prompt_tokens,
            completion_tokens=self.sequence.num_generated,
            finish_reason=self._finish_reason,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            sampling=request.sampling,
        )

    def _durations(self) -> tuple[float, float, float]:
        """(queue, prefill, decode); what has not begun lasted 0."""
        if self._scheduled is None:
            return 0.0, 0.0, 0.0
        queue_s = self._scheduled - self._submitted
        if self._first_token is None:
            return queue_s, 0.0, 0.0
        end = self._first_token if self._finished is None else self._finished
        return queue_s, self._first_token - self._scheduled, end - self._first_token
