"""Counts the tokens of an answer that are thinking."""

from __future__ import annotations

from collections.abc import Sequence

from twofold.text.chat.events import Event


class ThoughtCount:
    """Tokens of one answer's thinking, counted as its chunks are parsed."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._thinks, self._num_unsure = False, 0
        """Whether the last text was thinking, and the tokens since then, whose text the parser still holds."""

    def add(self, reply: Sequence[Event], num_tokens: int) -> None:
        """Count a chunk. Held-back tokens belong to the text that follows them; marks belong to neither."""
        if any(event.kind == "reasoning" for event in reply):
            self.num_tokens += self._num_unsure + num_tokens
        if reply:
            self._thinks, self._num_unsure = reply[-1].kind == "reasoning", 0
        elif self._thinks:
            self._num_unsure += num_tokens
