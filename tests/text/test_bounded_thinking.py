"""Thinking held to a number of tokens, token by token, with bytes as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from twofold.api.constraints import TokenMatcher
from twofold.text.chat.bounded_thinking import BoundedThinking, ThinkingMarks

THINK = ThinkingMarks((b"<think>",), (b"</think>", b"<call>"), tuple(b"</think>"))
OPENED = ThinkingMarks(THINK.begins, THINK.ends, THINK.end_tokens, opened=True)
ANYWHERE = ThinkingMarks(THINK.begins, THINK.ends, THINK.end_tokens, anywhere=True)


def written(marks: ThinkingMarks, budget: int, wanted: bytes, constraint: Any = None) -> bytes:
    """Output of an answer whose model wants these bytes one after the other."""
    matcher: TokenMatcher = BoundedThinking(marks, budget, lambda token: bytes([token]), constraint).start()
    printed, left = b"", list(wanted)
    while left or matcher.forced is not None:
        token = matcher.forced
        if token is None:
            token = left.pop(0)
            assert matcher.admits(token)
        matcher.take(token)
        printed += bytes([token])
    assert matcher.error is None
    return printed


@pytest.mark.parametrize(
    ("marks", "budget", "wanted", "printed"),
    [
        (OPENED, 3, b"abcdef", b"abc</think>def"),
        (OPENED, 0, b"abc", b"</think>abc"),
        (OPENED, 20, b"ab</think>cdefghijklmnopqrstuvwxyz", b"ab</think>cdefghijklmnopqrstuvwxyz"),
        (OPENED, 3, b"a<call>bcdef", b"a<c</think>all>bcdef"),
        (OPENED, 8, b"a<call>bcdef", b"a<call>bcdef"),
        (OPENED, 2, b"ab<think>cd", b"ab</think><think>cd"),
        (THINK, 2, b" \n<think>abcd", b" \n<think>ab</think>cd"),
        (THINK, 2, b"no <think>abcd", b"no <think>abcd"),
        (THINK, 2, b"<thin>abcd", b"<thin>abcd"),
        (ANYWHERE, 2, b"no <think>abcd", b"no <think>ab</think>cd"),
        (ANYWHERE, 3, b"<think>ab</think>x<think>abcd", b"<think>ab<</think>/think>x<think></think>abcd"),
    ],
)
def test_the_mark_comes_after_the_budget(
    marks: ThinkingMarks, budget: int, wanted: bytes, printed: bytes
) -> None:
    assert written(marks, budget, wanted) == printed


class Utf8:
    """A grammar that admits whole characters alone."""

    masks_first = True
    ended = False
    error = None
    forced = None

    def __init__(self) -> None:
        self.open = 0

    def start(self, masks_first: bool = True) -> Utf8:
        return self

    def mask(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        allowed = [(0x80 <= byte < 0xC0) == (self.open > 0) for byte in range(256)]
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def admits(self, token: int) -> bool:
        return bool(self.mask()[token // 32] >> token % 32 & 1)

    def take(self, token: int) -> None:
        assert self.admits(token)
        self.open = self.open - 1 if self.open else 2 * (token == "€".encode()[0])

    def prepare(self) -> None: ...

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


def test_a_character_becomes_whole_before_the_mark() -> None:
    assert written(OPENED, 2, "a€b".encode(), Utf8()) == "a€</think>b".encode()
