"""Streaming detokenisation: token ids → text, for streamed answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text, never half a UTF-8 character, decoding each id a few times.

    It keeps a window of ids: `[context | pending]`. The context is already emitted; it is needed because decoders may
    treat the start of a text differently (SentencePiece strips a space). New text is the window's decoding beyond the
    context's. It is held back while it ends in U+FFFD, which is how an unfinished character decodes.
    Concatenated pieces equal `Tokenizer.decode` of all ids for byte-level decoders. Byte-fallback decoders decode a
    whole run of byte tokens at once, so there the two may differ where the bytes are not UTF-8.
    """

    __slots__ = ("_context_text", "_decode", "_num_context", "_text_of", "_window")

    _MAX_PENDING: Final = 12
    """More ids than an unfinished character can have: beyond this, invalid UTF-8 stays invalid."""
    _MAX_TAIL: Final = 3
    """A UTF-8 character has at most 4 bytes, so its unfinished start has at most 3 ids of one byte each."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        text_of: Callable[[int], str] = lambda token_id: "",
    ) -> None:
        """
        Args:
            decode: turns ids into text, invalid UTF-8 into U+FFFD (`Tokenizer.detokenizer` provides it).
            text_of: the text of an id if it is the same in every context, which saves decoding; "" if it depends on the
                neighbours or is not whole characters.
        """
        self._decode = decode
        self._text_of = text_of
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def push(self, token_id: int) -> str:
        """The text that became final with this id; may be empty."""
        if self._num_context == len(self._window):  # nothing is held back
            piece = self._text_of(token_id)
            if piece:
                self._window, self._num_context, self._context_text = [token_id], 1, piece
                return piece
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT) and len(text) > len(self._context_text):
            piece = text[len(self._context_text) :]
            self._keep(len(self._window))
            return piece
        if len(self._window) - self._num_context <= self._MAX_PENDING:
            return ""
        return self._give_up_waiting(text)

    def flush(self) -> str:
        """The text still held back, unfinished characters as U+FFFD. The stream may continue afterwards."""
        text = self._decode(self._window)
        piece = text[len(self._context_text) :]
        self._keep(len(self._window))
        return piece

    def _give_up_waiting(self, text: str) -> str:
        """Emit pending ids that can no longer become a character, all but the tail that still can."""
        size = len(self._window)
        for cut in range(size - 1, size - 1 - self._MAX_TAIL, -1):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == text:
                piece = head[len(self._context_text) :]
                self._keep(cut)
                return piece
        return self.flush()

    def _keep(self, cut: int) -> None:
        """Mark everything before `cut` as emitted; the last emitted ids stay as context."""
        begin = max(self._num_context, cut - self._MAX_PENDING)
        if begin >= cut:
            begin = max(0, cut - 1)
        del self._window[:begin]
        self._num_context = cut - begin
        self._context_text = self._decode(self._window[: self._num_context])


class MarkedDetokenizer:
    """The same, but with the text of some special tokens that decoding skips."""

    __slots__ = ("_plain", "_shown")

    def __init__(self, plain: IncrementalDetokenizer, shown: Mapping[int, str]) -> None:
        self._plain = plain
        self._shown = shown

    def push(self, token_id: int) -> str:
        mark = self._shown.get(token_id)
        return self._plain.push(token_id) if mark is None else self._plain.flush() + mark

    def flush(self) -> str:
        return self._plain.flush()
