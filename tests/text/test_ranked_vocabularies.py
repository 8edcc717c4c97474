"""Vocabularies by rank (tiktoken's files, tekken.json) give the ids of tiktoken, and damaged ones are named."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer import Tokenizer

from tests.text.vocabulary_files import (
    CHAT,
    CONTROL,
    MANY,
    TEKKEN,
    control_free,
    texts,
    trained_ranks,
    write_tekken,
    write_tiktoken,
)

KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return trained_ranks()


@MANY
def test_tiktoken_files_give_tiktokens_ids(tmp_path: Path, ranks: dict[bytes, int], num_texts: int) -> None:
    ours = Tokenizer.load(write_tiktoken(tmp_path, ranks), vocab_size=len(ranks) + 256)
    special = {token: len(ranks) + at for at, token in enumerate(CONTROL)}
    theirs = tiktoken.Encoding(
        "kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special | {"<think>": len(ranks) + 9}
    )
    for text in texts(num_texts):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, allowed_special="all"), repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.vocab_size == len(ranks) + 256
    assert ours.eos_token_ids == {len(ranks) + 2}
    assert len(ours.special_token_ids) == 255  # but <think>


@MANY
def test_hunyuans_file_gives_tiktokens_ids(tmp_path: Path, ranks: dict[bytes, int], num_texts: int) -> None:
    """The same file by another name: other words, composed text, and control tokens that no file lists."""
    (write_tiktoken(tmp_path, ranks) / "tiktoken.model").rename(tmp_path / "hy.tiktoken")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|eos|>", "chat_template": CHAT})
    )
    ours = Tokenizer.load(tmp_path, vocab_size=len(ranks) + 210)
    control = ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"]
    control += [f"<|extra_{number}|>" for number in range(205)]
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    theirs = tiktoken.Encoding(
        "hy",
        pat_str=pattern + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={token: len(ranks) + at for at, token in enumerate(control)},
    )
    for text in [*texts(num_texts), "a<|extra_204|>b", "e\u0301"]:
        composed = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == theirs.encode(composed, allowed_special="all"), repr(text)
    assert ours.eos_token_ids == {len(ranks) + 3}


@MANY
def test_tekken_files_give_tiktokens_ids_after_the_control_tokens(
    tmp_path: Path, ranks: dict[bytes, int], num_texts: int
) -> None:
    ours = Tokenizer.load(write_tekken(tmp_path, ranks), vocab_size=len(ranks) + 9)
    used = dict(list(ranks.items())[:-1])
    theirs = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=used, special_tokens={})
    for text in control_free(texts(num_texts)):
        ids = ours.encode(text)
        assert ids == [token_id + 10 for token_id in theirs.encode(text)], repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.encode("a<s>b") == [10 + ranks[b"a"], 1, 10 + ranks[b"b"]]
    assert ours.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"special_tokens": None}, "has no special_tokens"),
        ({"special_tokens": [{"rank": 10, "token_str": "x"}]}, "rank below 10"),
        ({"vocab": [{"rank": 1, "token_bytes": "AA=="}]}, "the rank 0"),
        ({"vocab": []}, "vocab has 0 tokens"),
        ({"config": None}, "config"),
    ],
)
def test_a_damaged_tekken_file_is_named(
    tmp_path: Path, ranks: dict[bytes, int], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        Tokenizer.load(write_tekken(tmp_path, ranks, **changes), vocab_size=3000)
