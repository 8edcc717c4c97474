"""Streams one answer's tokens as text and ends it at a stop string.

It holds back a possible beginning of a stop string (and the detokenizer half a UTF-8 character), so that emitted text
is never retracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Interface of `Tokenizer.detokenizer()`: incremental, never emits half a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """The text of one answer. `stopped` is true after a stop string, `stopped_by`, occurred; the stop string and all
    text after it are dropped."""

    __slots__ = ("_detokenizer", "_held", "_stop", "stopped", "stopped_by")

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Text that can be emitted after this token."""
        text = self._detokenizer.push(token_id)
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """End of the answer: the held-back text, unless a stop string ended it."""
        if self.stopped:
            return ""
        text = self._detokenizer.flush()
        shown = self._release(text) if self._stop else text
        if self.stopped:  # set by _release, which mypy does not look into
            return shown  # type: ignore[unreachable]
        rest, self._held = self._held, ""
        return shown + rest

    def _release(self, text: str) -> str:
        self._held += text
        ends = [(at, stop) for at, stop in ((self._held.find(stop), stop) for stop in self._stop) if at >= 0]
        if ends:
            first, self.stopped_by = min(ends)
            shown, self._held, self.stopped = self._held[:first], "", True
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
