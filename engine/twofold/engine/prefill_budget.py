"""How many prompt tokens a step may take beside the answers, from how long steps have taken.

A running stream's next token waits for the whole step, and so does a newcomer; so a step is to take no longer than a
limit. What was measured says how many prompt tokens fit: the time of a step without any, and the time that each adds.
Both are medians of the last few measurements: a first step that warms up, or one that the machine's other programs
held up, changes nothing. Knows no clock; times are of whichever the caller reads.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

LEAST_TOKENS: Final = 32
"""A step that prefills at all takes as many, if prompts have them: with fewer its time goes into reading weights."""
LEAST_LIMIT_S: Final = 0.05
STEPS_PER_LIMIT: Final = 4
"""The limit nobody has set is so many steps without prefill."""
_LIMITS_ALONE: Final = 3
"""A step takes so many limits while nobody decodes: no stream pauses, only a newcomer would wait. Chunks of 240 instead
of 512 tokens cost the bundled model a tenth to a fifth of its prefill speed."""
_REMEASURE_AFTER: Final = 64
"""So many steps with prefill in a row, then one without, if somebody decodes: its time may have changed."""
_TILE: Final = 16
"""Kernels take rows in tiles of so many."""


class PrefillBudget:
    """What the scheduler asks before each step, and the engine tells after it. Owned by the engine's thread."""

    def __init__(self, max_tokens: int, max_step_s: float | None = None) -> None:
        """At most `max_tokens` a step, which is to take `max_step_s` (None: four without prefill, at least 50 ms)."""
        self._max_tokens = max_tokens
        self._max_step_s = max_step_s
        self._decode_s: deque[float] = deque(maxlen=9)
        self._token_s: deque[float] = deque(maxlen=5)
        self._with_prefill = _REMEASURE_AFTER  # steps since one without; there was none yet

    @property
    def max_step_s(self) -> float | None:
        """How long a step with prefill may take; None while that is not known."""
        if self._max_step_s is not None or not self._decode_s:
            return self._max_step_s
        return max(STEPS_PER_LIMIT * median(self._decode_s), LEAST_LIMIT_S)

    def num_tokens(self, num_decoding: int) -> int:
        """Prompt tokens for the next step, beside `num_decoding` answers' next ones. 0 only if somebody decodes."""
        # Streams that never pause between prompts would leave a step without prefill unmeasured for ever.
        if num_decoding and self._with_prefill >= _REMEASURE_AFTER:
            return 0
        limit_s = self.max_step_s
        if limit_s is None or not self._token_s:
            return self._max_tokens
        decode_s = median(self._decode_s) if self._decode_s else 0.0
        limit_s *= 1 if num_decoding else _LIMITS_ALONE
        fitting = int((limit_s - decode_s) / median(self._token_s)) // _TILE * _TILE
        return min(max(fitting, LEAST_TOKENS), self._max_tokens)

    def observe(self, num_prefill: int, num_decoding: int, step_s: float) -> None:
        """A step with so many prompt tokens and answers took `step_s`."""
        self._with_prefill = self._with_prefill + 1 if num_prefill else 0
        if step_s <= 0:  # a virtual clock that nothing has moved
            return
        if num_prefill == 0:
            self._decode_s.append(step_s)
            return
        # A handful of tokens says little about what each costs; the first word is better than none.
        if num_prefill >= LEAST_TOKENS or not self._token_s:
            decode_s = median(self._decode_s) if self._decode_s else 0.0
            self._token_s.append(max(step_s - decode_s, 0.1 * step_s) / num_prefill)
