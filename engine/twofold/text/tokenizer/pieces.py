"""The bytes of single tokens, which `decode` cannot return: it drops leading spaces and replaces half characters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import tokenizers

from twofold.text.tokenizer.backend_calls import decode_ids

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """Token → bytes, for one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, repeated: Mapping[int, int]) -> None:
        """`repeated`: ids that the backend does not know → the id with the same text."""
        self._backend = backend
        self._repeated = repeated
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {
            token_id: token.content.encode() for token_id, token in added.items()
        }
        special = {token_id for token_id, token in added.items() if token.special}
        self.special = frozenset(special | {token for token, first in repeated.items() if first in special})
        """Ids that `decode` skips."""
        kinds = _decoder_kinds(backend)
        self._byte_level = "ByteLevel" in kinds
        self._only_byte_level = kinds <= {"ByteLevel", "Sequence"} and self._byte_level
        self._texts: dict[int, str] = {}
        self._byte_fallback = "ByteFallback" in kinds

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 bytes, maybe half a character; an added token's name; empty for an id without a token."""
        token_id = self._repeated.get(token_id, token_id)
        if token_id in self._added:
            return self._added[token_id]
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        return self._inside_a_text(token_id)

    def text_of(self, token_id: int) -> str:
        """The token's characters if `decode` returns the same in every context; "" otherwise: half a character, an
        added token, or a decoder that looks at more than one token."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._whole_characters(token_id)
        return text

    def _whole_characters(self, token_id: int) -> str:
        if not self._only_byte_level or self._repeated.get(token_id, token_id) in self._added:
            return ""
        try:
            text = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            return ""
        return "" if "\ufffd" in text else text

    def _inside_a_text(self, token_id: int) -> bytes:
        """The bytes that the token adds after another one: decoders drop a space only at the start of a text."""
        once = decode_ids(self._backend, [token_id], skip_special_tokens=False)
        twice = decode_ids(self._backend, [token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :].encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Names of the decoder and, if it is a sequence, of its parts."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


@lru_cache(maxsize=1)
def character_of_byte() -> dict[int, str]:
    """GPT-2's alphabet, which byte-level vocabularies use."""
    return {byte: character for character, byte in _byte_of_character().items()}


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
