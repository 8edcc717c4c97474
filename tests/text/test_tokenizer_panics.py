"""Panics of the tokenizers package, which are no Exceptions: they end a load or a request, never the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from twofold.api.errors import ModelLoadError, RequestError
from twofold.text.tokenizer import Tokenizer
from twofold.text.tokenizer.backend_calls import encode_texts, failure_of, reading

from tests.tiny_models.writing import write_tiny_tokenizer

CUTS_NOTHING: Final = {"type": "FixedLength", "length": 0}
"""A rule that panics while it encodes any text."""
STRIPS_TOO_MUCH: Final = {"type": "Strip", "content": "e", "start": 0, "stop": 9}
"""A decoder that panics at tokens of fewer characters."""


def with_part(directory: Path, **parts: Any) -> Path:
    write_tiny_tokenizer(directory)
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))
    return directory


class PanicException(BaseException):
    """As the package raises it: derived from BaseException."""


class Panicking:
    def encode_batch_fast(self, *_: object, **__: object) -> Any:
        raise PanicException("index out of bounds:\nthe len is 1")


def test_a_tokenizer_that_panics_at_every_text_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="fails on every text: chunk size must be non-zero") as caught:
        Tokenizer.load(with_part(tmp_path, pre_tokenizer=CUTS_NOTHING))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_panic_while_encoding_is_a_bad_request() -> None:
    with pytest.raises(RequestError, match="cannot encode this text: index out of bounds: the len is 1"):
        encode_texts(Panicking(), ["text"])  # type: ignore[arg-type]


def test_a_text_without_tokens_is_a_bad_request(tmp_path: Path) -> None:
    words = {
        "type": "WordLevel",
        "vocab": {"<|im_start|>": 1, "<|im_end|>": 2, "<|endoftext|>": 0},
        "unk_token": "?",
    }
    tokenizer = Tokenizer.load(with_part(tmp_path, model=words, pre_tokenizer=None, decoder=None))
    with pytest.raises(RequestError, match="Missing"):
        tokenizer.encode("unknown")


def test_a_panic_while_decoding_is_replaced(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(with_part(tmp_path, decoder=STRIPS_TOO_MUCH))
    (token,) = tokenizer.encode("e")
    assert tokenizer.decode([token]) == "\ufffd"
    assert tokenizer.decode([token, token]) == "\ufffd\ufffd"
    assert tokenizer.token_bytes(token) == "\ufffd".encode()
    stream = tokenizer.detokenizer()
    pushed = "".join([*(stream.push(token) for _ in range(20)), stream.flush()])
    assert set(pushed) == {"\ufffd"}


@pytest.mark.parametrize("other", [KeyboardInterrupt, SystemExit])
def test_process_exits_are_not_swallowed(tmp_path: Path, other: type[BaseException]) -> None:
    with pytest.raises(other):
        failure_of(other())
    with pytest.raises(other), reading(tmp_path):
        raise other
