"""Streaming detokenization: never half a character, nothing lost, and bounded however bad the bytes are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from twofold.text.tokenizer import IncrementalDetokenizer, Tokenizer

from tests.tiny_models.writing import write_tiny_tokenizer

REPLACEMENT = "\ufffd"
NUM_TOKENS = 267


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("byte-level")
    write_tiny_tokenizer(directory)
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Vocabulary like SentencePiece models (Mixtral): words with a leading ▁, and <0x..> tokens for all other bytes."""
    directory = tmp_path_factory.mktemp("byte-fallback")
    words = ["▁", "▁the", "▁end", "s", "é"]
    vocab = {
        token: i for i, token in enumerate(["<unk>", *words, *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>"}))
    return Tokenizer.load(directory)


def stream(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    if not skip:
        detokenizer = IncrementalDetokenizer(partial(tokenizer.decode, skip_special_tokens=False))
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One byte-level token per byte."""
    symbols = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in symbols):
        symbols[byte] = chr(256 + offset)
    ids = [tokenizer.token_id(symbols[byte]) for byte in raw]
    return [token_id for token_id in ids if token_id is not None]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=60), skip=st.booleans())
def test_cached_texts_of_single_tokens_change_no_piece(byte_level, byte_fallback, ids, skip) -> None:
    for tokenizer in (byte_level, byte_fallback):
        slow = IncrementalDetokenizer(lambda some, of=tokenizer: of.decode(some, skip_special_tokens=skip))
        assert stream(tokenizer, ids, skip=skip) == [*(slow.push(token_id) for token_id in ids), slow.flush()]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=80), skip=st.booleans())
def test_pieces_add_up_whatever_the_ids(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(byte_level, ids, skip=skip)) == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(raw=st.lists(st.sampled_from(list("aé€🐉".encode() + b"\xff\xc0\x80")), max_size=60))
def test_pieces_add_up_on_nearly_valid_utf8(byte_level: Tokenizer, raw: list[int]) -> None:
    ids = byte_ids(byte_level, bytes(raw))
    assert len(ids) == len(raw)
    text = bytes(raw).decode("utf-8", errors="replace")
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=40).filter(lambda text: REPLACEMENT not in text))
@example(text="Grüße 🐉, 漢字 und e\u0301\u200d👩\u200d🚀")
def test_no_piece_holds_half_a_character(byte_level: Tokenizer, text: str) -> None:
    pieces = stream(byte_level, byte_ids(byte_level, text.encode()))
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert "".join(pieces) == text
    # Each character comes with its last byte, not later.
    assert len([piece for piece in pieces if piece]) == len(text)
    assert pieces[-1] == ""


def test_a_character_waits_for_its_last_byte(byte_level: Tokenizer) -> None:
    assert stream(byte_level, byte_ids(byte_level, "a🐉b".encode())) == ["a", "", "", "", "🐉", "b", ""]


def test_an_unfinished_character_ends_as_one_replacement(byte_level: Tokenizer) -> None:
    assert stream(byte_level, byte_ids(byte_level, b"a\xf0\x9f")) == ["a", "", "", REPLACEMENT]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(alphabet=" thends é€🐉", max_size=30))
def test_byte_fallback_streams_valid_text_exactly(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text.replace(" ", "▁"))
    pieces = stream(byte_fallback, ids)
    assert "".join(pieces) == byte_fallback.decode(ids)
    assert all(REPLACEMENT not in piece for piece in pieces)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(1, 261), max_size=60))
def test_byte_fallback_never_fails_and_keeps_what_is_valid(byte_fallback: Tokenizer, ids: list[int]) -> None:
    """Its decoder judges whole runs of bytes, so only the words between them can be compared."""
    streamed, whole = "".join(stream(byte_fallback, ids)), byte_fallback.decode(ids)
    assert [word for word in streamed.split() if word in ("the", "end")] == [
        word for word in whole.split() if word in ("the", "end")
    ]


def test_bytes_of_tokens_add_up_to_the_text(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    text = "Grüße 🐉, said  the\tfox\n<|im_end|>"
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == text
    assert any(byte_level.token_bytes(token_id)[:1] > b"\x7f" for token_id in ids), (
        "halves of characters are among them"
    )
    ids = byte_fallback.encode("the fox 🐉")
    # A token of SentencePiece holds the space before its word, also at the start of a text.
    assert b"".join(map(byte_fallback.token_bytes, ids)).decode().lstrip(" ") == "the fox 🐉"
    assert byte_level.token_bytes(10**6) == b"", "the model's rows may be more than the tokens"


def test_a_leading_space_is_stripped_once(byte_fallback: Tokenizer) -> None:
    the, end = (byte_fallback.token_id(token) for token in ("▁the", "▁end"))
    assert the is not None
    assert end is not None
    assert stream(byte_fallback, [the, end, end]) == ["the", " end", " end", ""]


@pytest.mark.parametrize("pattern", [b"\xff", b"\xe2", b"\xe2\x82", b"\xf0\x9f\x90", b"\x80"])
def test_endless_broken_bytes_are_bounded_and_prompt(byte_level: Tokenizer, pattern: bytes) -> None:
    """A stream that never becomes UTF-8: every decode stays small, and text keeps coming."""
    longest, held, most_held = 0, 0, 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_level.decode(ids)

    detokenizer = IncrementalDetokenizer(decode)
    ids = byte_ids(byte_level, pattern) * 500
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        held = 0 if pieces[-1] else held + 1
        most_held = max(most_held, held)
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == byte_level.decode(ids)
    assert longest <= 32
    assert most_held <= 16


@pytest.mark.parametrize("num_broken", range(8, 18))
def test_a_character_after_broken_bytes_is_kept_whole(byte_level: Tokenizer, num_broken: int) -> None:
    """Wherever patience ends, a character that has begun is not torn."""
    ids = byte_ids(byte_level, b"\xff" * num_broken + "🐉é".encode())
    pieces = stream(byte_level, ids)
    assert "".join(pieces) == REPLACEMENT * num_broken + "🐉é"
    assert pieces[-1] == ""


def test_many_special_tokens_hold_nothing_back(byte_level: Tokenizer, tmp_path: Path) -> None:
    ids = [2] * 100 + byte_ids(byte_level, b"x") + [2] * 100
    assert "".join(stream(byte_level, ids)) == "x"
    assert stream(byte_level, ids)[100] == "x"


def test_marks_of_calls_are_shown_among_skipped_tokens(byte_level: Tokenizer) -> None:
    mark, other = sorted(byte_level.special_token_ids)[:2]
    begin, end = byte_ids(byte_level, "é".encode()), byte_ids(byte_level, b" b")
    detokenizer = byte_level.detokenizer(shown=frozenset((mark,)))
    pieces = [detokenizer.push(token_id) for token_id in (*begin, mark, other, *end, mark)]
    text = byte_level.token_bytes(mark).decode()
    assert "".join(pieces) == f"é{text} b{text}"
    assert pieces[len(begin)] == text
    assert detokenizer.flush() == ""
