"""vocab.json and merges.txt, for checkpoints without tokenizer.json → a backend of `tokenizers`.

The files do not say how text is split into words: the tokenizer's class does. Reference: transformers
`models/qwen2/tokenization_qwen2.py`, `models/gpt2/tokenization_gpt2.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer.bounded_file import read_bounded_text
from twofold.text.tokenizer.word_rules import WORD_RULES
from twofold.weights.json_file import Fields, read_json_object

NAMES: Final = ("vocab.json", "merges.txt")
_RULES: Final = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
"""Class → the name of its word rule."""
_NORMALISED: Final = frozenset(("Qwen2Tokenizer",))
"""Classes that compose characters (NFC)."""


def read_bpe_files(directory: Path, config: Fields) -> tokenizers.Tokenizer:
    """The tokenizer of a directory with both files. Raises ModelLoadError naming the file and the fault."""
    vocab_path, merges_path = (directory / name for name in NAMES)
    kind = str(config.data.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in _RULES:
        raise config.error("tokenizer_class", kind, f"one of {sorted(_RULES)}, or a tokenizer.json beside it")
    vocabulary = _read_vocabulary(vocab_path)
    try:
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=_read_merges(merges_path, vocabulary))
        )
    except ValueError as error:
        raise ModelLoadError(f"{merges_path}: {str(error)[:200]}; download it again") from None
    backend.pre_tokenizer = WORD_RULES[_RULES[kind]].pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    if kind in _NORMALISED:
        backend.normalizer = normalizers.NFC()
    for token_id, token in sorted(_added_tokens(directory, config).items()):
        if backend.token_to_id(token.content) is None and token_id != backend.get_vocab_size():
            raise config.error("added_tokens_decoder", {token_id: token.content}, "ids without gaps")
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    return backend


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json_object(path, "the vocabulary")
    ids = {token for token in vocabulary.values() if isinstance(token, int) and not isinstance(token, bool)}
    if ids != set(range(len(vocabulary))):
        raise ModelLoadError(f"{path}: expected an id for each token, from 0 without gaps; download it again")
    return vocabulary


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_bounded_text(path).split("\n")):
        if not line or (number == 0 and line.startswith("#version")):
            continue
        one, _, other = line.rstrip("\r").partition(" ")
        if one not in vocabulary or other not in vocabulary or one + other not in vocabulary:
            raise ModelLoadError(
                f"{path}: line {number + 1} is {line[:80]!r}, expected two tokens whose union is one; download it again"
            )
        merges.append((one, other))
    return merges


def _added_tokens(directory: Path, config: Fields) -> dict[int, AddedToken]:
    """Id → token, of tokenizer_config.json or, in older repositories, added_tokens.json."""
    declared: Any = config.data.get("added_tokens_decoder")
    if isinstance(declared, dict):
        return {_id(token_id, config): _token(token, config) for token_id, token in declared.items()}
    path = directory / "added_tokens.json"
    if not path.exists():
        return {}
    added = Fields(str(path), read_json_object(path, "the added tokens"))
    return {
        _id(token_id, added): AddedToken(text, special=True, normalized=False)
        for text, token_id in added.data.items()
    }


def _id(value: Any, fields: Fields) -> int:
    text = str(value)
    if not text.isdecimal():
        raise fields.error("token id", value, "a whole number")
    return int(text)


def _token(token: Any, config: Fields) -> AddedToken:
    content = token.get("content") if isinstance(token, dict) else None
    if not isinstance(content, str) or not content:
        raise config.error("added_tokens_decoder", token, "ids, each with a token's content")
    flags = {name: token.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(content, special=token.get("special") is not False, **flags)
