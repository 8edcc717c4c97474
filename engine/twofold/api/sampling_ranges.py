"""Allowed range of each sampling setting: requests, HTTP bodies and command lines are all checked against this
table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Range(NamedTuple):
    low: float
    high: float
    low_allowed: bool = True

    def holds(self, value: float) -> bool:
        """Whether `value` lies within the range; NaN never does."""
        return (self.low <= value if self.low_allowed else self.low < value) and value <= self.high

    def __str__(self) -> str:
        return f"{'' if self.low_allowed else 'above '}{self.low:g} to {self.high:g}"


SAMPLING_RANGES: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "temperature": Range(0, 100),
        "top_p": Range(0, 1),
        "top_k": Range(0, 2**31),
        "min_p": Range(0, 1),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
        "repetition_penalty": Range(0.01, 100),
    }
)
BIAS_RANGE: Final = Range(-100, 100)
"""Bias per token of logit_bias."""
LOGPROBS_RANGE: Final = Range(0, 20)
"""Number of most likely tokens reported beside each token."""
