"""safetensors files → checked arrays."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.errors import ModelLoadError
from twofold.blocks.gqa import Gqa
from twofold.models.model_files import open_model_files
from twofold.models.sizing import measure_files
from twofold.weights.checkpoint import Checkpoint, read_header

from tests.tiny_models.writing import (
    tiny_weights,
    to_bfloat16,
    write_safetensors,
    write_tiny_model,
    write_weights,
)
from tests.weights.checkpoint_edits import SMALL, edit_header, edit_index


def to_bytes(values: Any, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return to_bfloat16(values).tobytes()
    return bytes(values.astype(np.float16 if dtype == "float16" else np.float32).tobytes())


def test_values_shapes_and_views(tmp_path: Path) -> None:
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([-1.5], np.float32)}
    write_safetensors(tmp_path / "model.safetensors", weights, "float32")
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint) == ["a", "b"]
    a = checkpoint.matrix("a", (2, 3))
    assert (a.format, a.shape) == ("f32", (2, 3))
    np.testing.assert_array_equal(a.data, weights["a"])
    np.testing.assert_array_equal(checkpoint.vector("b", (1,)), weights["b"])
    assert not a.data.flags.writeable
    assert not a.data.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        a.data[0, 0] = 1.0


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 3.14159, 1e-30, 65504.0])
def test_dtypes(tmp_path: Path, value: float) -> None:
    weights = {"w": np.full((3, 2), value, np.float32), "v": np.full(3, value, np.float32)}
    for dtype, expected in (("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32")):
        write_safetensors(tmp_path / "model.safetensors", weights, dtype)
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.matrix("w", (3, 2)).format == expected
        relative = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 0.0}[dtype]
        np.testing.assert_allclose(checkpoint.vector("v", (3,)), weights["v"], rtol=relative, atol=1e-7)


def test_bfloat16_round_trip_is_exact() -> None:
    every_bit = np.arange(2**16, dtype=np.uint16)
    widened = (every_bit.astype(np.uint32) << np.uint32(16)).view(np.float32)
    finite = np.isfinite(widened)
    np.testing.assert_array_equal(to_bfloat16(widened[finite]), every_bit[finite])


def test_data_off_the_element_boundary(tmp_path: Path) -> None:
    """A header of odd length is legal; the tensor is then copied to where it may be read."""
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"w": np.array([[1.0, 2.0]], np.float32)}, "float32")
    edit_header(file, lambda header: header["__metadata__"].update(pad="x"))
    for pad in ("", "x", "xx", "xxx"):
        edit_header(file, lambda header, pad=pad: header["__metadata__"].update(pad=pad))  # type: ignore[misc]
        matrix = Checkpoint.open(tmp_path).matrix("w", (1, 2))
        np.testing.assert_array_equal(matrix.data, [[1.0, 2.0]])
        assert matrix.data.flags.aligned


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    one = Checkpoint.open(write_tiny_model(tmp_path / "one", SMALL))
    many = Checkpoint.open(write_tiny_model(tmp_path / "many", replace(SMALL, num_shards=3)))
    assert set(one) == set(many)
    for name in one:
        shape = one.entry(name).shape
        if len(shape) == 1:
            np.testing.assert_array_equal(one.vector(name, shape), many.vector(name, shape))
        else:
            np.testing.assert_array_equal(one.matrix(name, shape).data, many.matrix(name, shape).data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["separate", "fused"])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_experts_whatever_their_names(tmp_path: Path, architecture: Any, layout: Any, dtype: Any) -> None:
    model = replace(SMALL, architecture=architecture, expert_layout=layout, dtype=dtype)
    files = open_model_files(write_tiny_model(tmp_path, model))
    assert files.config.dtype == dtype
    weights = tiny_weights(replace(model, expert_layout="separate"))
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if architecture == "MixtralForCausalLM":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    for layer in files.config.moe_layers:
        experts = files.expert_weights(layer)
        assert len(experts) == 4
        for index, matrices in enumerate(experts):
            for name, matrix in zip(names, matrices, strict=True):
                expected = weights[f"model.layers.{layer}.{block}.experts.{index}.{name}.weight"]
                assert matrix.format == {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
                assert matrix.shape == expected.shape
                bits = np.frombuffer(to_bytes(expected, dtype), matrix.data.dtype).reshape(expected.shape)
                np.testing.assert_array_equal(matrix.data, bits)


def test_expert_weights_are_views_of_the_file(tmp_path: Path) -> None:
    files = open_model_files(write_tiny_model(tmp_path, SMALL))
    mapped = files.tensors._mapped(tmp_path / "model.safetensors")
    begin = np.frombuffer(mapped, np.uint8).ctypes.data
    end = begin + (tmp_path / "model.safetensors").stat().st_size
    for matrices in files.expert_weights(0):
        assert all(begin <= matrix.data.ctypes.data < end for matrix in matrices)


def test_dense_weights_by_name(tmp_path: Path) -> None:
    model = replace(SMALL, attention_bias=True, mlp_only_layers=(0,))
    files = open_model_files(write_tiny_model(tmp_path, model))
    raw = tiny_weights(model)
    block, attention = files.layers[0][0]
    assert isinstance(block, Gqa)
    for name in "qkv":
        expected = raw[f"model.layers.0.self_attn.{name}_proj.weight"]
        np.testing.assert_array_equal(attention.matrix(name).data, expected)
    biases = [raw[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]
    np.testing.assert_array_equal(block.linear.bias(attention), np.concatenate(biases))
    np.testing.assert_array_equal(files.head.matrix("vocabulary").data, raw["lm_head.weight"])
    assert files.head.specs["vocabulary"] != files.embedding.specs["table"]


def test_a_tied_head_is_the_embedding_even_if_written_out(tmp_path: Path) -> None:
    model = replace(SMALL, tie_word_embeddings=True)
    write_tiny_model(tmp_path, model)
    weights = tiny_weights(model)
    write_weights(tmp_path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    files = open_model_files(tmp_path)
    assert files.head.specs["vocabulary"] == files.embedding.specs["table"]


def test_formats_may_differ(tmp_path: Path) -> None:
    """q, k and v of several formats, and experts whose down is another, as is one expert of a layer: run as they
    are."""
    model = replace(SMALL, num_shards=2)
    write_tiny_model(tmp_path, model)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    names = list(read_header(shard))
    weights = tiny_weights(model)
    half = {name: weights[name] for name in names if ".experts." not in name}
    rest = {name: weights[name] for name in weights if ".experts." in name}
    downs = {name: rest.pop(name) for name in list(rest) if "down_proj" in name}
    first = "model-00001-of-00002.safetensors"
    plain = {name: weights[name] for name in weights if name not in half and ".experts." not in name}
    write_safetensors(tmp_path / first, plain, "float32")
    write_safetensors(shard, half, "bfloat16")
    write_safetensors(tmp_path / "experts.safetensors", rest, "float32")
    write_safetensors(tmp_path / "downs.safetensors", downs, "float16")
    edit_index(tmp_path, lambda names: names.update(dict.fromkeys(rest, "experts.safetensors")))
    edit_index(tmp_path, lambda names: names.update(dict.fromkeys(downs, "downs.safetensors")))
    files = open_model_files(tmp_path)
    assert {files.layers[0][0][1].format(part) for part in "qkv"} == {"f32", "bf16"}
    assert [matrix.format for matrix in files.expert_weights(0)[0]] == ["f32", "f32", "f16"]

    odd = "model.layers.1.mlp.experts.2.up_proj.weight"
    write_safetensors(
        tmp_path / "experts.safetensors", {n: w for n, w in rest.items() if n != odd}, "float32"
    )
    write_safetensors(tmp_path / "odd.safetensors", {odd: rest[odd]}, "bfloat16")
    edit_index(tmp_path, lambda names: names.update({odd: "odd.safetensors"}))
    files = open_model_files(tmp_path)
    usual = ("f32", "f32", "f16")
    by_expert = [usual] * model.num_experts
    by_expert[2] = ("f32", "bf16", "f16")
    assert files.expert_formats() == (usual, tuple(by_expert))
    assert [matrix.format for matrix in files.expert_weights(1)[2]] == ["f32", "bf16", "f16"]
    routed = files.config.routed
    assert measure_files(files).expert_bytes == sum(
        routed.expert_bytes(each) for each in [usual] * model.num_experts + by_expert
    )


def mapped_bytes_in_memory(file: Path) -> int:
    """Resident size of a mapped file in this process, as the kernel reports it."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and len(fields) >= 5:
            found = line.endswith(str(file))
        elif found and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


def test_released_pages_leave_memory_and_return(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    values = np.arange(2**18, dtype=np.float32).reshape(2**10, 2**8)
    write_safetensors(file, {"v": values, "w": values + 1}, "float32")
    checkpoint = Checkpoint.open(tmp_path)
    first, second = (checkpoint.matrix(name, values.shape).data for name in "vw")
    checkpoint.will_read("vw")
    np.testing.assert_array_equal(first, values)
    np.testing.assert_array_equal(second, values + 1)
    assert mapped_bytes_in_memory(file) >= 2 * values.nbytes
    checkpoint.release_pages("w")
    assert mapped_bytes_in_memory(file) <= values.nbytes + 4096
    checkpoint.release_pages("vw")
    assert mapped_bytes_in_memory(file) <= 4096  # the page that ends the header may stay
    np.testing.assert_array_equal(first, values)


def write_fp8(directory: Path, tensors: dict[str, tuple[str, Any]]) -> None:
    """A safetensors file of (dtype, array of the same size) by name."""
    header_, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header_[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header_).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
def test_fp8_comes_with_its_scales(tmp_path: Path, kind: str) -> None:
    values = np.arange(130 * 140, dtype=np.uint8).reshape(130, 140)
    scales = np.array([[0.5, 2.0], [1.0, 4.0]], np.float32)
    stored = {"F32": scales, "BF16": to_bfloat16(scales), "F16": scales.astype(np.float16)}[kind]
    write_fp8(tmp_path, {"w": ("F8_E4M3", values), "w_scale_inv": (kind, stored)})
    checkpoint = Checkpoint.open(tmp_path)
    matrix = checkpoint.matrix("w", (130, 140))
    assert matrix.format == "fp8"
    np.testing.assert_array_equal(matrix.data, values)
    assert matrix.scales is not None
    np.testing.assert_array_equal(matrix.scales, scales)
    assert checkpoint.companions("w") == ("w_scale_inv",)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "tensor w_scale_inv is missing"),
        (("F32", np.ones((1, 2), np.float32)), r"w_scale_inv has shape \[1, 2\], expected \[2, 2\]"),
        (("F8_E4M3", np.ones((2, 2), np.uint8)), "scales w_scale_inv are F8_E4M3, expected floats"),
    ],
)
def test_fp8_without_proper_scales_is_refused(tmp_path: Path, scales: Any, message: str) -> None:
    tensors = {"w": ("F8_E4M3", np.ones((130, 140), np.uint8))}
    write_fp8(tmp_path, tensors if scales is None else tensors | {"w_scale_inv": scales})
    with pytest.raises(ModelLoadError, match=message):
        Checkpoint.open(tmp_path).matrix("w", (130, 140))
