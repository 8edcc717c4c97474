"""Lengths of chat prompts and answers, in tokens, with the long tails of recorded conversations.

Both are lognormal. Prompts: fitted to 30,174 paragraphs of public-domain tales (1.35 tokens per word). Answers: the
maximum-likelihood fit to 73 answers of gpt-oss-20b to public questions, cut off at 511 tokens, so censored there.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution of token counts, cut to [low, high]."""

    median: float
    log_std: float
    low: int = 1
    high: int = 1 << 20

    def draw(self, random_source: random.Random) -> int:
        drawn = random_source.lognormvariate(math.log(self.median), self.log_std)
        return min(self.high, max(self.low, round(drawn)))

    def at_most(self, high: int) -> Lengths:
        """The same distribution with another upper cut."""
        return replace(self, low=min(self.low, high), high=high)


CHAT_INPUT: Final = Lengths(median=46.4, log_std=1.05, low=4)
CHAT_OUTPUT: Final = Lengths(median=311.0, log_std=1.22, low=4)
