"""tekken.json, the vocabulary of Mistral's checkpoints instead of tokenizer.json → a backend of `tokenizers`.

    {"config": {"pattern": …, "default_vocab_size": …, "default_num_special_tokens": …},
     "special_tokens": [{"rank": 0, "token_str": "<unk>"}, …], "vocab": [{"rank": 0, "token_bytes": base64}, …]}

The control tokens have the first ids, the others follow in rank order. Tokens beyond the default size are not used.
Reference: mistral-common `tokens/tokenizers/tekken.py`.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer.ranked_vocabulary import ranked_backend
from twofold.text.tokenizer.word_rules import WordRule
from twofold.weights.json_file import Fields, read_json_object

NAME: Final = "tekken.json"


def read_tekken(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of `path`. Raises ModelLoadError naming the file and the fault."""
    data = read_json_object(path, "the vocabulary")
    fields = Fields(str(path), data)
    config = fields.section("config")
    if config is None:
        raise fields.error("config", None, "the vocabulary's sizes and pattern")
    num_control = config.integer("default_num_special_tokens", minimum=0)
    num_ranks = config.integer("default_vocab_size", minimum=num_control + 256) - num_control
    control = _control_tokens(path, data.get("special_tokens"), num_control)
    ranks = {token: num_control + rank for token, rank in _ranks(path, data.get("vocab"), num_ranks).items()}
    try:
        words = WordRule((config.text("pattern"),))
        backend = ranked_backend(ranks, words.pre_tokenizer(), control)
    except Exception as error:  # the package raises this class for a pattern
        raise ModelLoadError(f"{path}: {str(error)[:200]}; download it again") from None
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return backend


def _control_tokens(path: Path, listed: Any, number: int) -> dict[str, int]:
    """Token → id; ids without a name are fillers."""
    found = {rank: f"<SPECIAL_{rank}>" for rank in range(number)}
    for token in listed if isinstance(listed, list) else ():
        text = token.get("token_str") if isinstance(token, dict) else None
        if not isinstance(text, str) or not text or token.get("rank") not in found:
            raise ModelLoadError(
                f"{path}: special_tokens holds {str(token)[:80]}, expected a token_str and a rank below {number}"
            )
        found[token["rank"]] = text
    if not listed:
        raise ModelLoadError(
            f"{path}: has no special_tokens, which this version of the format needs; get the tokenizer.json of this "
            "model"
        )
    return {text: rank for rank, text in found.items()}


def _ranks(path: Path, listed: Any, number: int) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for at, token in enumerate(listed[:number] if isinstance(listed, list) else ()):
        try:
            text = base64.b64decode(token["token_bytes"], validate=True) if token["rank"] == at else b""
        except (binascii.Error, KeyError, TypeError, ValueError):
            text = b""
        if not text or text in ranks:
            raise ModelLoadError(
                f"{path}: vocab holds {str(token)[:80]}, expected a new token_bytes in base64 and the rank {at}"
            )
        ranks[text] = at
    if len(ranks) < number or any(bytes((byte,)) not in ranks for byte in range(256)):
        raise ModelLoadError(f"{path}: vocab has {len(ranks)} tokens, expected {number} with all 256 bytes")
    return ranks
