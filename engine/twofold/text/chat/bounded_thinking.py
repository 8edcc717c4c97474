"""Limits an answer's reasoning to a token budget, then forces its end mark.

A matcher around that of the answer's grammar, if there is one. Marks are matched on the tokens' bytes, so that a
vocabulary may spell them with several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twofold.api.constraints import CompiledConstraint, TokenMatcher


@dataclass(frozen=True)
class ThinkingMarks:
    """How one answer's reasoning begins and ends."""

    begins: tuple[bytes, ...]
    ends: tuple[bytes, ...]
    """Marks that end it; `end_tokens` spell one of them."""
    end_tokens: tuple[int, ...]
    anywhere: bool = False
    """It may also begin after text; otherwise only at the start of the answer."""
    opened: bool = False
    """The prompt ends inside it."""


@dataclass(frozen=True)
class BoundedThinking:
    """A constraint that limits reasoning to `budget` tokens. See `api.constraints.CompiledConstraint`."""

    marks: ThinkingMarks
    budget: int
    token_bytes: Callable[[int], bytes]
    constraint: CompiledConstraint | None = None
    """Further constraint on the answer."""

    def start(self, masks_first: bool = True) -> TokenMatcher:
        inner = None if self.constraint is None else self.constraint.start(masks_first)
        return _Matcher(self, inner)


class _Matcher:
    """Matches one answer: its reasoning, then its grammar. See `api.constraints.TokenMatcher`."""

    def __init__(self, bound: BoundedThinking, inner: TokenMatcher | None) -> None:
        self.masks_first = inner is not None and inner.masks_first
        self._inner = inner
        self._marks = bound.marks
        self._bytes_of = bound.token_bytes
        self._remaining = bound.budget
        self._inside = bound.marks.opened
        self._over = False
        """No further reasoning is possible."""
        self._text = b""
        """The last bytes read, which may contain the beginning of a mark."""
        self._num_forced = 0
        """Number of leading `end_tokens` already written."""
        self._failure: str | None = None

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended

    @property
    def error(self) -> str | None:
        return self._failure if self._inner is None else self._inner.error

    @property
    def forced(self) -> int | None:
        """See `TokenMatcher.forced`."""
        if not self._inside or self._remaining > 0 or self.error is not None:
            return None
        token = self._marks.end_tokens[self._num_forced]
        # An unfinished character must be completed first.
        if self._inner is not None and not self._inner.mask()[token // 32] >> token % 32 & 1:
            return None
        return token

    def mask(self) -> npt.NDArray[np.uint32]:
        assert self._inner is not None, "an answer without a grammar has no masks"
        return self._inner.mask()

    def admits(self, token: int) -> bool:
        return self._inner is None or self._inner.admits(token)

    def take(self, token: int) -> None:
        if self._inner is not None:
            self._inner.take(token)
        if not self._over:
            self._count(token)
            self._read(self._bytes_of(token))

    def prepare(self) -> None:
        if self._inner is not None:
            self._inner.prepare()

    def fail(self, reason: str) -> None:
        if self._inner is not None:
            self._inner.fail(reason)
        elif self._failure is None:
            self._failure = f"the answer cannot continue: {reason}"

    def _count(self, token: int) -> None:
        """Count `token`, the next one, before it is read."""
        if not self._inside:
            return
        if self._remaining > 0:
            self._remaining -= 1
        elif token == self._marks.end_tokens[self._num_forced]:
            self._num_forced = (self._num_forced + 1) % len(self._marks.end_tokens)
        else:
            self._num_forced = 0

    def _read(self, text: bytes) -> None:
        """Look for marks, up to the end of `text`."""
        self._text += text
        while not self._over:
            marks = self._marks.ends if self._inside else self._marks.begins
            if not self._inside and not self._marks.anywhere and not _may_begin(self._text.lstrip(), marks):
                self._over = True
                return
            found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
            if not found:
                break
            at, mark = min(found)
            self._text = self._text[at + len(mark) :]
            self._num_forced = 0
            self._over = self._inside and not self._marks.anywhere
            self._inside = not self._inside
        if self._inside or self._marks.anywhere:
            longest = max(map(len, self._marks.begins + self._marks.ends))
            self._text = self._text[-longest:]


def _may_begin(text: bytes, marks: Sequence[bytes]) -> bool:
    """Whether `text` is a mark or the beginning of one."""
    return any(mark.startswith(text) or text.startswith(mark) for mark in marks)
