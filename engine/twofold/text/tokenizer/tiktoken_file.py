"""tiktoken.model, the vocabulary of Kimi's checkpoints instead of tokenizer.json → a backend of `tokenizers`.

A line has a token's bytes in base64 and its rank; ids are ranks. tokenizer_config.json (`added_tokens_decoder`) names
the control tokens after the last rank; the other ids of the 256 after it are reserved.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models

from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer.bounded_file import read_bounded_bytes
from twofold.text.tokenizer.pieces import character_of_byte
from twofold.text.tokenizer.word_rules import KIMI_K2
from twofold.weights.json_file import Fields

NAME: Final = "tiktoken.model"
_NUM_RESERVED: Final = 256


def read_tiktoken(path: Path, config: Fields) -> tokenizers.Tokenizer:
    """The tokenizer of `path` and its tokenizer_config.json. Raises ModelLoadError naming the file and the line."""
    ranks = _read_ranks(path)
    vocabulary = {_spelled(token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(ranks), ignore_merges=True))
    backend.pre_tokenizer = KIMI_K2.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    named = _named_tokens(config)
    for token_id in range(len(ranks), len(ranks) + _NUM_RESERVED):
        content, special = named.get(token_id, (f"<|reserved_token_{token_id}|>", True))
        token = AddedToken(content, special=special, normalized=False)
        if not (backend.add_special_tokens([token]) if special else backend.add_tokens([token])):
            raise config.error("added_tokens_decoder", content, f"a token that {path.name} has not")
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    lines = read_bounded_bytes(path).splitlines()
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(filter(None, lines)):
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            token = b""
        if not token or token in ranks or rank != str(number).encode():
            raise ModelLoadError(
                f"{path}: line {number + 1} is {line[:80]!r}, expected a new token in base64 and its rank {number}; "
                "download it again"
            )
        ranks[token] = number
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise ModelLoadError(
            f"{path}: has no token for the byte {missing[0]}, expected all 256; download it again"
        )
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """For each token, in rank order, the two tokens that lower-ranked merges leave of it."""
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1 and len(parts := _merged(token, ranks, rank)) == 2:
            merges.append((_spelled(parts[0]), _spelled(parts[1])))
    return merges


def _merged(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        lowest, at = min((ranks.get(parts[at] + parts[at + 1], below), at) for at in range(len(parts) - 1))
        if lowest >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _spelled(token: bytes) -> str:
    table = character_of_byte()
    return "".join(map(table.__getitem__, token))


def _named_tokens(config: Fields) -> dict[int, tuple[str, bool]]:
    """Id → (text, whether it is a control token)."""
    declared: Any = config.data.get("added_tokens_decoder", {})
    named: dict[int, tuple[str, bool]] = {}
    for token_id, token in declared.items() if isinstance(declared, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not token_id.isdecimal() or not isinstance(content, str) or not content:
            raise config.error("added_tokens_decoder", {token_id: token}, "ids, each with a token's content")
        named[int(token_id)] = content, token.get("special") is not False
    return named
