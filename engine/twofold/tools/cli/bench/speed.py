"""Speeds of one measured answer, and the median of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from twofold.api.types import Usage


@dataclass(frozen=True)
class Speed:
    """One answer by the wall clock; `usage` holds the engine's own times, None for another program."""

    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    """From the call to the first token."""
    decode_s: float
    """From the first token to the last."""
    usage: Usage | None = None

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.new_tokens - 1) / self.decode_s

    def as_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prefill_ms": self.prefill_s * 1e3,
            "decode_ms": self.decode_s * 1e3,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }
        if self.usage is not None:
            clock = Speed(self.prompt_tokens, self.new_tokens, self.usage.prefill_s, self.usage.decode_s)
            body["clock"] = {
                "name": self.usage.clock,
                "prefill_tokens_per_s": clock.prefill_tokens_per_s,
                "decode_tokens_per_s": clock.decode_tokens_per_s,
            }
        return body


def median_speed(speeds: Sequence[Speed]) -> Speed:
    """The answer with the median decode time (the lower of the middle two), with the median prefill time."""
    middle = sorted(speeds, key=lambda speed: speed.decode_s)[(len(speeds) - 1) // 2]
    prefill_s = statistics.median(speed.prefill_s for speed in speeds)
    return replace(middle, prefill_s=prefill_s)
