"""Answers of POST /infill, as llama.cpp's /completion gives them."""

from __future__ import annotations

from typing import Literal

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict


class Timings(TypedDict):
    """Computed prompt tokens, answer tokens, and the run's time for them."""

    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillEvent(TypedDict):
    """One piece of a streamed answer."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int


class InfillAnswer(InfillEvent):
    """A whole answer, or a stream's last event, whose `content` is empty. `id_slot` is always -1."""

    model: str
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    """Tokens of prompt and answer, which the KV cache holds."""
    timings: Timings
