"""tokenizer.model, SentencePiece's own format, for checkpoints without tokenizer.json → the fields of GGUF metadata.

Supports only what the loaded families use: BPE without a normaliser. Reference: sentencepiece's
`sentencepiece_model.proto` (ModelProto 1: pieces, 2: trainer_spec, 3: normalizer_spec).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.text.tokenizer.bounded_file import read_bounded_bytes

NAME: Final = "tokenizer.model"
_BPE: Final = 2
_KINDS: Final = range(1, 7)
_ID_FIELDS: Final = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
"""Fields of trainer_spec → GGUF's names."""
_DEFAULT_IDS: Final = {"unknown": 0, "bos": 1, "eos": 2}


def read_fields(path: Path) -> dict[str, Any]:
    """`tokenizer.ggml.*` as llama.cpp's converter writes it. Raises ModelLoadError naming the file and the fault."""
    data = read_bounded_bytes(path)
    try:
        return _fields(data, path)
    except (ValueError, struct.error, IndexError):
        raise ModelLoadError(f"{path}: not a SentencePiece model; download it again") from None


def _fields(data: bytes, path: Path) -> dict[str, Any]:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normaliser: dict[int, Any] = {}
    for number, value in _messages(data):
        if number == 1:
            piece = dict(_messages(value))
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append((piece[1].decode(), score, piece.get(3, 1)))
        elif number == 2:
            trainer = dict(_messages(value))
        elif number == 3:
            normaliser = dict(_messages(value))
    if not pieces or any(kind not in _KINDS for _, _, kind in pieces):
        raise ValueError
    model_type, rules = trainer.get(3, 1), normaliser.get(2, b"")
    if model_type != _BPE or rules or normaliser.get(4, 1):
        found = f"model_type {model_type}, {'a' if rules else 'no'} normaliser"
        raise ModelLoadError(
            f"{path}: {found}; expected BPE ({_BPE}) that keeps text as it is; convert the model's tokenizer to "
            "tokenizer.json with transformers"
        )
    # An id of -1 (no such token) is stored as a large number.
    ids = _DEFAULT_IDS | {name: trainer[field] for field, name in _ID_FIELDS.items() if field in trainer}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in pieces],
        "tokenizer.ggml.scores": np.array([score for _, score, _ in pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([kind for _, _, kind in pieces], np.int32),
        "tokenizer.ggml.add_space_prefix": bool(normaliser.get(3, 1)),
        **{f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items() if value < len(pieces)},
    }


def _messages(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field, value) of one protocol buffer message: an integer, four or eight bytes, or the bytes of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length, at = {1: (8, at), 5: (4, at)}[kind] if kind in (1, 5) else _varint(data, at)
        if kind not in (1, 2, 5) or at + length > len(data):
            raise ValueError
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError
