"""Tokenizer files: what they mean, equality with transformers, and every way they can be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.api.errors import ModelLoadError, RequestError
from twofold.text.tokenizer import Tokenizer

from tests.tiny_models.writing import write_tiny_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    roles = [tokenizer.token_id(tokenizer.special_tokens[f"{role}_token"]) for role in ("bos", "eos", "pad")]
    assert roles == [0, 2, 0]
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.vocab_size == 267


def test_special_tokens_in_text_are_one_id_each(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>the cat<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the cat<|im_end|>"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_encode_and_decode_equal_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_lone_surrogate_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [0]}, {"eos_token_id": 5}, {0, 2, 5}),
        ({}, {"text_config": {"eos_token_id": 5}}, {2, 5}),
        # Beyond the vocabulary.
        ({"eos_token_id": 9999}, {"eos_token_id": 5}, {2, 5}),
        (None, {"eos_token_id": None}, {2}),
        (None, None, {2}),
    ],
)
def test_which_tokens_end_an_answer(tmp_path: Path, generation: Any, config: Any, expected: set[int]) -> None:
    write_tiny_tokenizer(tmp_path)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_special_tokens_of_older_repositories(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    named = {"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["<|im_start|>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    assert Tokenizer.load(tmp_path).eos_token_ids == {2}


def test_settings_and_template_are_optional(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == frozenset()
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_token_objects_in_the_settings(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    edit_config(tmp_path, eos_token={"content": "<|endoftext|>", "lstrip": False})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.token_id(tokenizer.special_tokens["eos_token"]) == 0


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        raw = content if isinstance(content, bytes) else content.encode()
        (directory / name).write_bytes(raw)

    return damage


def changed(**parts: Any) -> Callable[[Path], None]:
    """tokenizer.json with these parts, those of the model inside it."""

    def damage(directory: Path) -> None:
        state = json.loads((directory / "tokenizer.json").read_text())
        state["model"] |= parts.pop("model", {})
        (directory / "tokenizer.json").write_text(json.dumps(state | parts))

    return damage


# What the tokenizers package would panic at, the second one only when it encodes.
LONG_PREFIX = changed(model={"continuing_subword_prefix": "##"})
SPLIT_PREFIX = changed(model={"continuing_subword_prefix": "#", "merges": ["t \u0120the"]})
NO_SUCH_TOKEN = changed(
    post_processor={
        "type": "Sequence",
        "processors": [
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<nowhere>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {},
            }
        ],
    }
)


@pytest.mark.parametrize(
    ("damage", "fragments"),
    [
        (LONG_PREFIX, ["tokenizer.json: merges ['t', 'h']", "2 bytes of continuing_subword_prefix"]),
        (SPLIT_PREFIX, ["tokenizer.json: merges ['t', '\u0120the']", "1 bytes"]),
        (NO_SUCH_TOKEN, ["tokenizer.json: its post_processor puts '<nowhere>'"]),
        (lambda directory: (directory / "tokenizer.json").unlink(), ["tokenizer.json: missing"]),
        (write("tokenizer.json", ""), ["tokenizer.json: not a valid tokenizer"]),
        (write("tokenizer.json", '{"model": {"type": "???"}}'), ["tokenizer.json: not a valid tokenizer"]),
        (write("tokenizer.json", b"\xff\xfe"), ["tokenizer.json: not UTF-8"]),
        (write("tokenizer_config.json", "{"), ["tokenizer_config.json: not valid JSON"]),
        (write("tokenizer_config.json", "[]"), ["tokenizer_config.json", "object"]),
        (
            write("tokenizer_config.json", '{"eos_token": 3}'),
            ["tokenizer_config.json: eos_token is 3", "text"],
        ),
        (
            write("tokenizer_config.json", '{"eos_token": "<nowhere>"}'),
            ["tokenizer_config.json: eos_token is '<nowhere>'", "tokenizer.json"],
        ),
        (
            write("chat_template.jinja", "{% for %}"),
            ["chat_template.jinja: not a valid Jinja template", "line 1"],
        ),
        (write("chat_template.jinja", b"\xff"), ["chat_template.jinja: not UTF-8"]),
        (write("chat_template.jinja", "{{ x | no_such_filter }}"), ["chat_template.jinja", "no_such_filter"]),
        (write("chat_template.jinja", " " * 2_000_000), ["chat_template.jinja: 2000000 bytes"]),
        (
            write("tokenizer_config.json", '{"chat_template": "{{"}'),
            ["tokenizer_config.json: chat_template", "line"],
        ),
        (write("tokenizer_config.json", '{"chat_template": 7}'), ["chat_template is a int"]),
        (
            write("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}]}'),
            ["chat_template has templates ['rag']", "'default'"],
        ),
    ],
)
def test_broken_files(
    tmp_path: Path,
    damage: Callable[[Path], None],
    fragments: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_tiny_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.load(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path) in message
    for fragment in fragments:
        assert fragment in message
    assert capfd.readouterr().err == ""


def test_a_tokenizer_of_another_model_is_refused(directory: Path) -> None:
    Tokenizer.load(directory, vocab_size=267)
    with pytest.raises(ModelLoadError, match=r"token id 266, expected ids below the model's vocab_size 266"):
        Tokenizer.load(directory, vocab_size=266)
