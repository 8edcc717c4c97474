"""tiktoken's files, the vocabulary of some checkpoints instead of tokenizer.json → a backend of `tokenizers`.

A line has a token's bytes in base64 and its rank; ids are ranks. The control tokens follow the last rank:
tokenizer_config.json (`added_tokens_decoder`) may name them. The file's name tells the rest, which publishers state in
the code beside it: how text is split into words, and the other control tokens.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, normalizers

from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer.bounded_file import read_bounded_bytes
from twofold.text.tokenizer.ranked_vocabulary import ranked_backend
from twofold.text.tokenizer.word_rules import KIMI_K2, WORD_RULES, WordRule
from twofold.weights.json_file import Fields


@dataclass(frozen=True)
class _Kind:
    words: WordRule
    control: tuple[str, ...]
    """Control tokens in the order of their ids; {id} is the token's id."""
    composes: bool = False
    """Whether text is composed (NFC)."""


_KINDS: Final = {
    # Kimi
    "tiktoken.model": _Kind(KIMI_K2, ("<|reserved_token_{id}|>",) * 256),
    # Hunyuan
    "hy.tiktoken": _Kind(
        WORD_RULES["hunyuan"],
        (
            *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
            *(f"<|extra_{number}|>" for number in range(205)),
        ),
        composes=True,
    ),
}
NAMES: Final = tuple(_KINDS)


def read_tiktoken(path: Path, config: Fields) -> tokenizers.Tokenizer:
    """The tokenizer of `path` and its tokenizer_config.json. Raises ModelLoadError naming the file and the line."""
    kind, ranks = _KINDS[path.name], _read_ranks(path)
    backend = ranked_backend(ranks, kind.words.pre_tokenizer())
    if kind.composes:
        backend.normalizer = normalizers.NFC()
    named = _named_tokens(config)
    for token_id, usual in enumerate(kind.control, len(ranks)):
        content, special = named.get(token_id, (usual.format(id=token_id), True))
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
