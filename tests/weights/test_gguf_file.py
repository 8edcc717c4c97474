"""GGUF headers: what the package's own reader says of the same file, and every way a file can be wrong."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.api.errors import ModelLoadError
from twofold.models.model_files import open_model_files
from twofold.text.tokenizer import Tokenizer
from twofold.weights.gguf_file import GgufFile, is_gguf, model_name, read_header

from tests.tiny_models.gguf import (
    gguf_bytes,
    gguf_parts,
    write_tiny_gguf,
)
from tests.tiny_models.writing import TinyModel

SMALL = TinyModel(hidden_size=32, moe_intermediate_size=32, num_layers=1, num_experts=2, vocab_size=270)
F32, Q4_0 = 0, 2
Fields = dict[str, tuple[str, Any]]
Tensors = list[tuple[str, Sequence[int], int, int]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", SMALL, type_of=lambda name: "Q8_0")


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        return list(ours) == theirs
    if isinstance(theirs, float):
        return bool(np.float32(ours) == np.float32(theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def test_metadata_and_tensors_equal_those_of_the_packages_reader(good: Path) -> None:
    file, reader = GgufFile.open(good), gguf.GGUFReader(good)
    theirs = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(file.fields) == set(theirs)
    for key, field in theirs.items():
        assert same(file.fields[key], field.contents()), key
    assert len(file.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        found = file.tensors[tensor.name]
        assert found.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert found.type_name == tensor.tensor_type.name
        assert (found.offset, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_every_value_type(tmp_path: Path) -> None:
    fields: Fields = {
        "u8": ("UINT8", 255), "i8": ("INT8", -128), "u16": ("UINT16", 65535), "i16": ("INT16", -1),
        "u32": ("UINT32", 7), "i32": ("INT32", -7), "u64": ("UINT64", 2**64 - 1), "i64": ("INT64", -(2**63)),
        "f64": ("FLOAT64", 0.1), "f32": ("FLOAT32", 0.8), "yes": ("BOOL", True), "text": ("STRING", "Ġü"),
        "none": ("[INT32]", []), "numbers": ("[UINT16]", [1, 2, 3]), "flags": ("[BOOL]", [True, False]),
        "texts": ("[STRING]", ["", "a b"]),
    }  # fmt: skip
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(fields, [], b""))
    found, tensors = read_header(path)
    assert tensors == {}
    for key, (_, value) in fields.items():
        assert list(found[key]) == value if isinstance(value, list) else found[key] == value, key
    assert found["f32"] == 0.8  # the number that was written, not its float32
    assert found["yes"] is True


def test_split_files_are_one_model(tmp_path: Path, good: Path) -> None:
    first = write_tiny_gguf(tmp_path / "m.gguf", SMALL, type_of=lambda name: "Q8_0", split_tensors=5)
    assert first.name.startswith("m-00001-of-0000")
    one, many = open_model_files(good), open_model_files(first)
    assert set(one.tensors) == set(many.tensors)
    assert len({many.tensors.entry(name).file for name in many.tensors}) > 1
    for ours, theirs in zip(one.expert_weights(0), many.expert_weights(0), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.data, b.data)


def test_a_broken_split_is_refused(tmp_path: Path) -> None:
    first = write_tiny_gguf(tmp_path / "m.gguf", SMALL, split_tensors=4)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    with pytest.raises(ModelLoadError, match=rf"{parts[1].name}: is a later part .* {first.name}, instead"):
        GgufFile.open(parts[1])
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match=r"is a part of a model in \d files, expected a name like"):
        GgufFile.open(renamed)
    first = renamed.rename(first)
    kept = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelLoadError, match=rf"{parts[2].name}: split.no is 1, expected 2"):
        GgufFile.open(first)
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=rf"{parts[2].name}: missing, but {first.name} says there are"):
        GgufFile.open(first)
    parts[2].write_bytes(kept)
    GgufFile.open(first)


def test_what_is_a_gguf_file(tmp_path: Path, good: Path) -> None:
    (tmp_path / "blob").write_bytes(good.read_bytes()[:64])
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(good)
    assert is_gguf(tmp_path / "absent.gguf")
    assert is_gguf(tmp_path / "blob")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "absent")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("/models/Qwen3-30B-A3B/", "Qwen3-30B-A3B"),
        ("tales-Q4_K_M.gguf", "tales-Q4_K_M"),
        ("/x/big-00001-of-00003.gguf", "big"),
    ],
)
def test_a_models_name(path: str, name: str) -> None:
    assert model_name(path) == name


def field(kind: str, value: Any, key: str = "x") -> Callable[[Fields, Tensors], bytes]:
    return lambda fields, tensors: gguf_bytes(fields | {key: (kind, value)}, tensors, bytes(65536))


def tensor(*entries: tuple[str, Sequence[int], int, int]) -> Callable[[Fields, Tensors], bytes]:
    return lambda fields, tensors: gguf_bytes(fields, list(entries), bytes(4096))


def raw(data: bytes) -> Callable[[Fields, Tensors], bytes]:
    return lambda fields, tensors: data


def header(version: int = 3, tensors: int = 0, fields: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def one_field(value_type: int, rest: bytes) -> bytes:
    return header(fields=1, rest=string(b"key") + struct.pack("<I", value_type) + rest)


WRONG: list[tuple[Callable[[Fields, Tensors], bytes], str]] = [
    (raw(b""), "is empty, expected a GGUF file"),
    (raw(b"GG"), "is cut off: the magic number needs 4 bytes at byte 0 of 2"),
    (raw(b"ggml" * 9), "begins with b'ggml', expected b'GGUF'"),
    (raw(header(version=1)), "is GGUF version 1, expected 2 or 3"),
    (raw(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)), "is a big-endian GGUF file"),
    (raw(header(fields=2**60)), "announces 1152921504606846976 metadata fields"),
    (raw(header(tensors=2**64 - 1)), "announces 0 metadata fields and 18446744073709551615 tensors"),
    (raw(header(fields=1, rest=struct.pack("<Q", 2**63) + bytes(20))), "a metadata key needs 9223372036854775808 b"),
    (raw(header(fields=1, rest=string(b"\xff") + bytes(20))), "a metadata key is not UTF-8 text"),
    (raw(one_field(13, bytes(16))), "metadata key has value type 13, expected 0 to 12"),
    (raw(one_field(7, b"\x02" + bytes(16))), "metadata key is a boolean of 2"),
    (raw(one_field(9, struct.pack("<IQ", 4, 2**61) + bytes(16))), "announces 2305843009213693952 elements"),
    (raw(one_field(9, struct.pack("<IQ", 8, 2**61) + bytes(16))), "announces 2305843009213693952 strings"),
    (raw(one_field(9, struct.pack("<IQ", 9, 1) + bytes(16))), "is an array of arrays"),
    (raw(one_field(9, struct.pack("<IQ", 99, 1) + bytes(16))), "has value type 99"),
    (raw(one_field(9, struct.pack("<IQ", 7, 2) + b"\x01\x03" + bytes(16))), "holds a boolean that is neither 0 nor 1"),
    (field("UINT32", 33, "general.alignment"), "general.alignment is 33, expected a power of two"),
    (field("UINT32", 0, "general.alignment"), "general.alignment is 0, expected a power of two"),
    (field("STRING", "32", "general.alignment"), "general.alignment is '32', expected a power of two"),
    (field("STRING", "2", "split.count"), "split.count is '2', expected a number"),
    (tensor(("a", [8], 999, 0)), "tensor 'a' has type 999, which is unknown"),
    (tensor(("a", [8], 4, 0)), "tensor 'a' has type 4, which is unknown"),
    (tensor(("a", [], F32, 0)), "tensor 'a' has 0 dimensions, expected 1 to 4"),
    (tensor(("a", [1] * 5, F32, 0)), "tensor 'a' has 5 dimensions, expected 1 to 4"),
    (tensor(("a", [2**40, 2**40], F32, 0)), "more elements than there can be"),
    (tensor(("a", [8, 0], F32, 0)), "more elements than there can be, or none"),
    (tensor(("a", [48, 2], Q4_0, 0)), "tensor 'a' is Q4_0 with rows of 48, expected a multiple of 32"),
    (tensor(("a", [8], F32, 8)), "tensor a begins at byte 8 of the data, expected a multiple of 32"),
    (tensor(("a", [8], F32, 2**63)), "tensor a ends at byte"),
    (tensor(("a", [2000], F32, 0)), "tensor a ends at byte"),
    (tensor(("a", [8], F32, 0), ("a", [8], F32, 32)), "tensor 'a' occurs twice"),
    (tensor(("a", [16], F32, 0), ("b", [8], F32, 32)), "tensors a and b overlap"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_file_names_what_is_wrong(
    tmp_path: Path, good: Path, make: Callable[[Fields, Tensors], bytes], message: str
) -> None:
    fields, tensors, _ = gguf_parts(good)
    path = tmp_path / "wrong.gguf"
    path.write_bytes(make(fields, tensors))
    with pytest.raises(ModelLoadError) as refused:
        open_model_files(path)
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_a_key_that_occurs_twice(tmp_path: Path) -> None:
    once = string(b"key") + struct.pack("<II", 4, 1)
    path = tmp_path / "wrong.gguf"
    path.write_bytes(header(fields=2, rest=once + once))
    with pytest.raises(ModelLoadError, match="metadata key 'key' occurs twice"):
        GgufFile.open(path)


def test_absent_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: no such file"):
        open_model_files(tmp_path / "absent.gguf")
    (tmp_path / "only.gguf").write_bytes(b"")
    with pytest.raises(
        ModelLoadError, match=r"holds only\.gguf and no config\.json; give the path of that file"
    ):
        open_model_files(tmp_path)


def read_everything(path: Path) -> None:
    for read in (open_and_read, Tokenizer.open):
        with contextlib.suppress(ModelLoadError):
            read(path)


def open_and_read(path: Path) -> None:
    files = open_model_files(path)
    for _, weights in files.parts():
        for part, spec in weights.specs.items():
            weights.vector(part) if len(spec.shape) == 1 else weights.stack(part)
    for layer in files.config.moe_layers:
        files.expert_weights(layer)


def test_cut_at_any_byte(tmp_path: Path, good: Path) -> None:
    data = good.read_bytes()
    begin = min(tensor.offset for tensor in GgufFile.open(good).tensors.values())
    path = tmp_path / "cut.gguf"
    for length in (*range(0, begin, 7), *range(begin, len(data), 997)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelLoadError):
            open_model_files(path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.binary(max_size=200), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_any_bytes_after_the_preamble(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, counts: tuple[int, int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(header(3, *counts, data))
    read_everything(path)
