"""Chooses how many prompt tokens a step may take beside decoding, from measured step times.

A running stream's next token waits for the whole step, and so does a new request, so a step's time is limited. The
prompt tokens that fit follow from the time of a step without any and the time that each token adds. Both are medians of
the last few measurements, so a warm-up step or one held up by other programs changes nothing. This module reads no
clock; times are on the caller's clock.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

MIN_TOKENS: Final = 32
"""Least prompt tokens of a prefill step, if prompts have them: with fewer its time goes into reading weights."""
MIN_LIMIT_S: Final = 0.05
STEPS_PER_LIMIT: Final = 4
"""Default limit, as a multiple of the time of a step without prefill."""
_LIMITS_ALONE: Final = 3
"""Multiple of the limit allowed while no sequence decodes: no stream pauses, only a new request would wait."""
_LIMIT_ALONE_S: Final = 1.0
"""Allowed then in any case. Three limits gave one layer of gpt-oss-120b 256 prompt tokens per step instead of 512 and
14 % less speed (GLM-4.5-Air 9 %, Qwen3-30B-A3B 8 %): an expert's weights are read for fewer tokens at a time."""
_REMEASURE_AFTER: Final = 64
"""Consecutive prefill steps after which one step only decodes, if any sequence decodes, to measure its time again."""
_TILE: Final = 16
"""Rows per kernel tile."""


class PrefillBudget:
    """Prompt-token budget of each step, updated after each step. Owned by the engine's thread."""

    def __init__(self, max_tokens: int, max_step_s: float | None = None) -> None:
        """At most `max_tokens` per step, and at most `max_step_s` beside decoding (None: the time of four steps without
        prefill, at least 50 ms)."""
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        self._decode_s: deque[float] = deque(maxlen=9)
        self._token_s: deque[float] = deque(maxlen=5)
        self._with_prefill = _REMEASURE_AFTER  # steps since one without; there was none yet

    @property
    def max_step_s(self) -> float | None:
        """Time limit of a step with prefill; None while unknown."""
        if self._max_step_s is not None or not self._decode_s:
            return self._max_step_s
        return max(STEPS_PER_LIMIT * median(self._decode_s), MIN_LIMIT_S)

    def num_tokens(self, num_decoding: int) -> int:
        """Prompt tokens for the next step beside `num_decoding` decoding sequences. 0 only if some sequence decodes."""
        # Uninterrupted prompts would otherwise leave a step without prefill unmeasured for ever.
        if num_decoding and self._with_prefill >= _REMEASURE_AFTER:
            return 0
        limit_s = self.max_step_s
        if limit_s is None or not self._token_s:
            return self._max_tokens
        decode_s = median(self._decode_s) if self._decode_s else 0.0
        if not num_decoding:
            limit_s = max(_LIMITS_ALONE * limit_s, _LIMIT_ALONE_S)
        fitting = int((limit_s - decode_s) / median(self._token_s)) // _TILE * _TILE
        return min(max(fitting, MIN_TOKENS), self._max_tokens)

    def observe(self, num_prefill: int, num_decoding: int, step_s: float) -> None:
        """Record a step of `num_prefill` prompt tokens and `num_decoding` decoding sequences that took `step_s`."""
        self._with_prefill = self._with_prefill + 1 if num_prefill else 0
        if step_s <= 0:  # a virtual clock that did not advance
            return
        if num_prefill == 0:
            self._decode_s.append(step_s)
            return
        # A handful of tokens says little about the time per token, but the first measurement is better than none.
        if num_prefill >= MIN_TOKENS or not self._token_s:
            decode_s = median(self._decode_s) if self._decode_s else 0.0
            self._token_s.append(max(step_s - decode_s, 0.1 * step_s) / num_prefill)
