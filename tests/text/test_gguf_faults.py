"""Harmless faults of GGUF converters: the vocabulary loads, and one line of the log tells each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from twofold.text.tokenizer import Tokenizer

from tests.text.gguf_vocabularies import as_gguf, sentencepiece_fields
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import TinyModel

TOKENS = ["a", "b", "c", "ab", "abc", "<|im_start|>", "<|im_end|>"]
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 1, 3, 3], np.int32),
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.eos_token_id": 6,
}
KEY = "tokenizer.ggml."


def changed(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`fields` with other values of keys, named without their prefix; None: without the key."""
    renamed = {KEY + key: value for key, value in changes.items()}
    return {key: value for key, value in (fields | renamed).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({}, ""),
        ({"merges": ["a b", "ab c", "b z", "bc", "a b"]}, "2 merges are left out"),
        ({"eos_token_id": 70}, "eos_token_id is 70, expected an id below 7: left out"),
        ({"padding_token_id": 7}, "padding_token_id is 7, expected an id below 7: left out"),
        ({"token_type": None}, "token_type is missing"),
        ({"token_type": np.ones(7, np.int32)}, "'<|im_start|>' is not of type control"),
        ({"token_type": np.array([1, 1, 1, 1, 1, 3, 3, 5, 5], np.int32)}, ""),
        ({"pre": None}, "pre is missing"),
    ],
    ids=str,
)
def test_a_byte_level_vocabulary(
    changes: dict[str, Any], reported: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = as_gguf(changed(BYTE_LEVEL, **changes))
    assert tokenizer.encode("abc<|im_end|>ab") == [4, 6, 3]
    assert tokenizer.decode([4, 6, 3]) == "abcab"
    assert tokenizer.eos_token_ids == {6}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(reported)
    assert all(line.startswith("tiny.gguf: ") and reported in line for line in lines)


@pytest.mark.parametrize("of_type", [1, 3])
def test_tokens_that_repeat_a_text(of_type: int, caplog: pytest.LogCaptureFixture) -> None:
    """Text has the first id, both ids have the text, and control tokens are hidden under either."""
    tokens = [*TOKENS, "ab", "<|im_end|>", "ab"]
    types = np.array([1, 1, 1, of_type, 1, 3, 3, of_type, 3, of_type], np.int32)
    tokenizer = as_gguf(changed(BYTE_LEVEL, tokens=tokens, token_type=types))
    assert tokenizer.encode("cab") == [2, 3]
    assert tokenizer.decode([2, 7, 9], skip_special_tokens=False) == "cabab"
    assert tokenizer.token_bytes(9) == b"ab"
    assert tokenizer.texts()[7] == "ab"
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.eos_token_ids == {6, 8}
    hidden = {5, 6, 8} | ({3, 7, 9} if of_type == 3 else set())
    assert tokenizer.special_token_ids == hidden
    stream = tokenizer.detokenizer()
    assert (
        "".join([*map(stream.push, [2, 9, 8, 0]), stream.flush()])
        == ("cA" if of_type == 3 else "cabA").lower()
    )
    assert [record.getMessage() for record in caplog.records] == [
        "tiny.gguf: 3 tokens repeat another's text, such as 7 that of 3"
    ]


@pytest.mark.parametrize("without", ["scores", "token_type"])
def test_a_sentencepiece_vocabulary_without(without: str, caplog: pytest.LogCaptureFixture) -> None:
    """Scores follow the order of the tokens here, as in trained vocabularies; types follow from texts and roles."""
    whole = as_gguf(sentencepiece_fields())
    tokenizer = as_gguf(changed(sentencepiece_fields(), **{without: None}))
    text = "once upon a time the king 日本 </s>"
    assert tokenizer.encode(text, add_special_tokens=True) == whole.encode(text, add_special_tokens=True)
    ids = whole.encode(text)
    assert tokenizer.decode(ids) == whole.decode(ids)
    assert tokenizer.special_token_ids == whole.special_token_ids
    assert [without in record.getMessage() for record in caplog.records] == [True]


def test_a_vocabulary_with_repeated_tokens_fills_the_embedding(tmp_path: Any) -> None:
    def edit(writer: Any) -> None:
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[201] = tokens[200]

    path = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(vocab_size=267), edit=edit)
    tokenizer = Tokenizer.open(path, vocab_size=267)
    assert tokenizer.vocab_size == 267
    assert tokenizer.token_bytes(200) == tokenizer.token_bytes(201) != b""
