"""Cache of token ids of earlier conversation turns.

Most of a turn's prompt repeats the previous one. Tokenising it again takes as long as the model takes for the new part.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from typing import Final

from twofold.server.bridge.models.protocol import ServingTokenizer

_MAX_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 300
"""Bytes of a cache entry besides its text and its tokens."""


class TokenCache:
    """LRU cache of token ids by stretch of prompt text. Thread-safe."""

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
