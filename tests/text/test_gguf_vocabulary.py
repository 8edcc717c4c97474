"""The tokenizer inside a GGUF file: the ids of the Hugging Face one, and those of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.api.errors import ModelLoadError
from twofold.models.bundled import bundled_model_path
from twofold.text.tokenizer import Tokenizer
from twofold.text.tokenizer.word_rules import WORD_RULES

from tests.text.gguf_vocabularies import as_gguf, sentencepiece_fields
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import TinyModel, write_tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def byte_level_fields(tokenizer_json: Path, pre: str) -> dict[str, Any]:
    """Metadata that llama.cpp's converter writes for a byte-level tokenizer.json."""
    data = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"] | {token["content"]: token["id"] for token in data["added_tokens"]}
    special = {token["content"] for token in data["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="module")
def bundled() -> tuple[Tokenizer, Tokenizer]:
    """(from GGUF's fields, from the directory)."""
    directory = bundled_model_path()
    return as_gguf(byte_level_fields(directory / "tokenizer.json", "qwen2")), Tokenizer.load(directory)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return as_gguf(sentencepiece_fields())


def test_the_bundled_models_ids_on_a_large_text(bundled: tuple[Tokenizer, Tokenizer]) -> None:
    ours, theirs = bundled
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.md"))[:40])
    text += "<|im_start|>user\nTell me the story.<|im_end|>\n<|im_start|>assistant\n"
    assert len(text) > 50_000
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.eos_token_ids == theirs.eos_token_ids == {0, 2}
    assert ours.special_token_ids == theirs.special_token_ids


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=80))
def test_the_bundled_models_ids_on_any_text(bundled: tuple[Tokenizer, Tokenizer], text: str) -> None:
    ours, theirs = bundled
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", sorted(WORD_RULES))
def test_every_word_rule_keeps_every_byte(tmp_path: Path, pre: str) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = as_gguf(byte_level_fields(tmp_path / "tokenizer.json", pre))
    text = "It's 12345 o'CLOCK,\r\n\n  the\tthing—and {x}  ÄÖ  日本語 \U0001f600 'Re<|im_end|>  "
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert 2 in ids


@pytest.mark.parametrize(
    ("pre", "text", "num_words"),
    [("gpt-2", " 1234", 1), ("qwen2", "1234", 4), ("llama-bpe", "1234", 2), ("smollm", "12 a", 3), ("glm4", "1234", 2),
     ("kimi-k2", "学3 it'll学", 4),
     ("deepseek-llm", "1234", 1), ("deepseek-coder", "1234", 4), ("deepseek-v3", "1234", 2)],
)  # fmt: skip
def test_word_rules_cut_numbers_their_own_way(tmp_path: Path, pre: str, text: str, num_words: int) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = as_gguf(byte_level_fields(tmp_path / "tokenizer.json", pre))
    assert len(tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)) == num_words


# Recorded from llama.cpp (llama-cpp-python 0.3.36) on the file that write_tiny_gguf(vocabulary="llama") writes.
RECORDED = [
    (
        "once upon a time there was a king",
        [1, 275, 340, 342, 361, 356, 352, 264, 266, 259, 281, 342, 271, 270, 266, 277],
    ),
    (" the  fox,  and", [1, 361, 261, 361, 280, 351, 359, 300, 361, 274]),
    (
        "Ünïcode → ok",
        [1, 361, 198, 159, 350, 198, 178, 340, 351, 341, 342, 361, 229, 137, 149, 361, 351, 347],
    ),
    ("a</s>the king", [1, 266, 2, 261, 277]),
    ("daughters", [1, 361, 341, 339, 356, 344, 345, 355, 283, 354]),
]


@pytest.mark.parametrize(("text", "expected"), RECORDED)
def test_sentencepiece_ids_are_llama_cpps(sentencepiece: Tokenizer, text: str, expected: list[int]) -> None:
    assert sentencepiece.encode(text, add_special_tokens=True) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=80))
def test_sentencepiece_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    # The space marker and the texts of special tokens are not reproduced exactly.
    if "▁" not in text and "<" not in text:
        assert sentencepiece.decode(sentencepiece.encode(text)) == text


def test_special_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel()), vocab_size=320)
    assert tokenizer.special_tokens == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.special_token_ids == {0, 1, 2}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}])
    assert prompt == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("the", add_special_tokens=True)[0] != 0


def test_begin_of_sequence(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("the", add_special_tokens=True)[0] == 1
    assert sentencepiece.encode("the")[0] != 1
    without = as_gguf(sentencepiece_fields() | {"tokenizer.ggml.add_bos_token": False})
    assert without.encode("the", add_special_tokens=True) == sentencepiece.encode("the")


def test_no_space_in_front(sentencepiece: Tokenizer) -> None:
    plain = as_gguf(sentencepiece_fields() | {"tokenizer.ggml.add_space_prefix": False})
    assert plain.encode(" the") == sentencepiece.encode("the")
    assert plain.decode(plain.encode(" the")) == " the"


def test_user_defined_tokens_are_found_and_shown() -> None:
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "<think>"]
    fields["tokenizer.ggml.token_type"] = np.append(fields["tokenizer.ggml.token_type"], np.int32(4))
    fields["tokenizer.ggml.scores"] = np.append(fields["tokenizer.ggml.scores"], np.float32(-1000))
    tokenizer = as_gguf(fields)
    ids = tokenizer.encode("a<think>")
    assert ids[-1] == len(fields["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.decode(ids) == "a<think>"


TOKENS = ["a", "b", "ab"]
PLAIN = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": ["a b"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer.ggml.model": None},
            "there is no tokenizer in it, expected 'gpt2', 'llama' or 'gemma4'; give",
        ),
        (
            {"tokenizer.ggml.model": "bert"},
            "tokenizer.ggml.model is 'bert', expected 'gpt2', 'llama' or 'gemma4'",
        ),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model is 3, expected a string"),
        ({"tokenizer.ggml.pre": "martian"}, "tokenizer.ggml.pre is 'martian', expected one of"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is empty"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is not a list of strings"),
        ({"tokenizer.ggml.token_type": np.array([1, 1])}, "token_type is not a list of 3 numbers"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing or empty, expected the merges"),
        ({"tokenizer.ggml.merges": []}, "tokenizer.ggml.merges is missing or empty, expected the merges"),
        (
            {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": None},
            "tokenizer.ggml.merges is missing or empty",
        ),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 'ab' and 0 of 1 more are not two of its tokens"),
        ({"tokenizer.ggml.merges": ["a z", "a b", "b z"]}, "merge 'a z' and 1 of 3 more are not two"),
        ({"tokenizer.ggml.eos_token_id": "a"}, "eos_token_id is 'a', expected a token id"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is 1, expected true or false"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template is not text"),
        ({"tokenizer.chat_template": "{% for"}, "tokenizer.chat_template: not a valid Jinja template"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": np.array([1, np.nan, 2])}, "not finite"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": np.zeros(2)}, "not a list of 3 numbers"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.scores": np.zeros(3),
                "tokenizer.ggml.tokens": ["a", "b", "ab" * 10_000],
            },
            "its tokens are longer than any vocabulary's",
        ),
    ],
)
def test_a_broken_vocabulary_names_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    fields = {key: value for key, value in (PLAIN | changes).items() if value is not None}
    with pytest.raises(ModelLoadError) as refused:
        as_gguf(fields)
    assert str(refused.value).startswith("tiny.gguf")
    assert message in str(refused.value)


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel())
    with pytest.raises(ModelLoadError, match="has 267 tokens, expected at most the 100 rows"):
        Tokenizer.open(path, vocab_size=100)
