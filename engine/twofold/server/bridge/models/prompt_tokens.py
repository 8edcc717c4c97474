"""Token ids of prompts: bounded by the context length, and cached by conversation turn."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final

from twofold.server.bridge.models.protocol import ServingTokenizer
from twofold.text.tokenizer.literal_text import PromptText

_CHARS_PER_TOKEN: Final = 8
"""Characters per token assumed for the first piece. Text has about 4, so most texts that fit are tokenised once."""
_SAFETY_FACTOR: Final = 2
_COUNTED_CHARS: Final = 512 * 1024
"""Longest text counted in one piece: a token takes 130 bytes while it is made, so 8 MB of one letter would take 1
GB."""
_WORD_GAP: Final = re.compile(r"(?<=\w) (?=\w)")
"""Gaps at which vocabularies split before merging, so that the pieces' tokens equal those of the whole text."""
_MAX_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 300
"""Bytes of a cache entry besides its text and its tokens."""


class TooManyTokensError(Exception):
    """A text has more tokens than the context holds. `count` returns their number; it takes seconds for some MB."""

    def __init__(self, max_context: int, limit_reason: str, count: Callable[[], int]) -> None:
        super().__init__(max_context)
        self.max_context, self.limit_reason = max_context, limit_reason
        self.count = count


class BoundedTokenizer:
    """A `ServingTokenizer` whose cost is bounded by the model's context, not by the text's length.

    It tokenises a prefix of the text, then one twice as long, and so on. Later text changes only the tokens of the word
    that it continues, and merges of a vocabulary do not halve the number of tokens before it. So a prefix with twice
    the context's tokens proves that the whole text is too long. An accepted text is always tokenised whole, in one
    call: its ids are the tokenizer's own. All pieces together are less than twice the last one.
    """

    def __init__(self, tokenizer: ServingTokenizer, max_context: int, limit_reason: str = "") -> None:
        """limit_reason: what ends the context before the model's own does, for messages."""
        self._tokenizer = tokenizer
        self._max_context, self._limit_reason = max_context, limit_reason

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of `text`. TooManyTokensError when there are certainly more than the context holds."""
        size = _CHARS_PER_TOKEN * self._max_context
        while size < len(text):
            if len(self._tokenizer.encode(text[:size])) > _SAFETY_FACTOR * self._max_context:
                raise TooManyTokensError(
                    self._max_context, self._limit_reason, lambda: self._count(text, add_special_tokens)
                )
            size *= 2
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _count(self, text: str, add_special_tokens: bool) -> int:
        """Number of tokens of the whole text; exact up to `_COUNTED_CHARS`, and beyond where words have gaps."""
        first, *others = _pieces(text)
        number = len(self._tokenizer.encode(first, add_special_tokens=add_special_tokens))
        return number + sum(len(self._tokenizer.encode(piece)) for piece in others)

    def segments(self, text: str) -> list[str]:
        """The text split into parts; a text that may be too long stays whole."""
        if len(text) > _CHARS_PER_TOKEN * self._max_context:
            return [text]
        return self._tokenizer.segments(text)

    def __getattr__(self, name: str) -> Any:
        """All that this class does not bound is the tokenizer's own."""
        return getattr(self._tokenizer, name)


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > _COUNTED_CHARS:
        least, most = begin + _COUNTED_CHARS, begin + 2 * _COUNTED_CHARS
        gap = _WORD_GAP.search(text, least, most)
        end = gap.start() if gap is not None else min(most, len(text))
        yield _cut(text, begin, end)
        begin = end
    yield _cut(text, begin, len(text))


def _cut(text: str, begin: int, end: int) -> str:
    """`text[begin:end]`, keeping the literal positions of a `PromptText`."""
    if not isinstance(text, PromptText) or end - begin == len(text):
        return text[begin:end]
    literal = frozenset(offset - begin for offset in text.literal if begin <= offset < end)
    return PromptText(text[begin:end], literal)


class TokenCache:
    """LRU cache of token ids by stretch of prompt text. Thread-safe.

    Most of a turn's prompt repeats the previous one. Tokenising it again takes as long as the model takes for the new
    part.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def encode(self, text: str, tokenizer: ServingTokenizer, salt: str = "") -> list[int]:
        """The same ids as `tokenizer.encode`. Entries match only under the same salt, so that timing reveals
        nothing."""
        segments = tokenizer.segments(text)
        if len(segments) < 2:
            return tokenizer.encode(text)
        ids: list[int] = []
        for stretch in segments:
            key = (salt, stretch)
            with self._lock:
                found = self._kept.get(key)
                if found is not None:
                    self._kept.move_to_end(key)
            if found is None:
                found = array("I", tokenizer.encode(stretch))
                self._keep(key, found)
            ids.extend(found)
        return ids

    def _keep(self, key: tuple[str, str], found: array[int]) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = found
            self._num_bytes += _size(key, found)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._kept.popitem(last=False))


def _size(key: tuple[str, str], found: array[int]) -> int:
    # Four bytes per character: the upper bound; the actual size depends on the text.
    return _ENTRY_BYTES + 4 * (len(key[0]) + len(key[1]) + len(found))
