"""Every way a directory of weights can be broken, each refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.errors import ModelLoadError
from twofold.models.model_files import open_model_files

from tests.tiny_models.writing import (
    tiny_config,
    tiny_weights,
    write_tiny_model,
    write_weights,
)
from tests.weights.checkpoint_edits import INDEX, SMALL, edit_header, edit_index


def remove(*names: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return damage


def truncate(name: str, keep: int) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / name
        file.write_bytes(file.read_bytes()[:keep])

    return damage


def append(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        file = directory / name
        file.write_bytes(file.read_bytes() + data)

    return damage


def header(edit: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda directory: edit_header(directory / "model.safetensors", edit)


def index(edit: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    return lambda directory: edit_index(directory, edit)


def rewrite(name: str, tensor: Any) -> Callable[[Path], None]:
    """The same checkpoint with one tensor replaced (or, with None, left out)."""

    def damage(directory: Path) -> None:
        weights = tiny_weights(SMALL)
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
        write_weights(directory, weights)

    return damage


def as_int64(header_: dict[str, Any]) -> None:
    """Two float32 elements are as long as one int64."""
    entry = header_["model.norm.weight"]
    entry["dtype"], entry["shape"] = "I64", [entry["shape"][0] // 2]


NORM = "model.norm.weight"
ONE_FILE: list[tuple[Callable[[Path], None], list[str]]] = [
    (remove("model.safetensors"), ["holds no model.safetensors", "download the weights"]),
    (truncate("model.safetensors", 0), ["model.safetensors: truncated, 0 bytes"]),
    (truncate("model.safetensors", 7), ["model.safetensors: truncated, 7 bytes"]),
    (truncate("model.safetensors", 100), ["model.safetensors: truncated, 100 bytes", "expected at least"]),
    (append("model.safetensors", b"x"), ["model.safetensors: ", "the file is damaged"]),
    (
        lambda directory: (directory / "model.safetensors").write_bytes(struct.pack("<Q", 10) + b"{}"),
        ["model.safetensors: truncated, 10 bytes, expected at least 18"],
    ),
    (truncate("model.safetensors", -1), ["model.safetensors: truncated", "download it again"]),
    (
        lambda directory: (directory / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{"),
        ["model.safetensors: header is not JSON"],
    ),
    (
        lambda directory: (directory / "model.safetensors").write_bytes(b"\xff" * 64),
        ["model.safetensors: truncated, 64 bytes"],
    ),
    (
        lambda directory: (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
        ["model.safetensors: header is not a JSON object"],
    ),
    (header(lambda h: h[NORM].pop("shape")), [NORM, "damaged"]),
    (header(lambda h: h[NORM].update(shape=[47])), [NORM, "damaged"]),
    (header(lambda h: h[NORM].update(shape=[-48])), [NORM, "damaged"]),
    (header(lambda h: h[NORM].update(shape=[True])), [NORM, "damaged"]),
    (header(lambda h: h[NORM].update(data_offsets=[0])), [NORM, "damaged"]),
    (header(lambda h: h[NORM].update(data_offsets=[200, 8])), [NORM, "damaged"]),
    (header(lambda h: h.update({NORM: 3})), [NORM, "damaged"]),
    (header(lambda h: h[NORM].update(data_offsets=[0, 192])), ["begins at byte", "damaged"]),
    (header(lambda h: h.pop(NORM)), ["begins at byte", "damaged"]),
    (header(as_int64), [NORM, "dtype I64", "f32, f16, bf16"]),
    (header(lambda h: h[NORM].update(dtype="Q4_K")), [NORM, "dtype Q4_K"]),
    (rewrite(NORM, None), [f"tensor {NORM} is missing"]),
    (rewrite(NORM, np.ones(47, np.float32)), [f"tensor {NORM} has shape [47], expected [48]"]),
    (
        rewrite("model.layers.1.mlp.experts.3.up_proj.weight", None),
        ["tensor model.layers.1.mlp.experts.3.up_proj.weight is missing"],
    ),
    (
        rewrite("model.layers.0.mlp.gate.weight", np.ones((5, 48), np.float32)),
        ["model.layers.0.mlp.gate.weight", "[5, 48]", "[4, 48]"],
    ),
    (
        rewrite("model.layers.0.self_attn.q_proj.bias", np.ones(64, np.float32)),
        ["model.layers.0.self_attn.q_proj.bias", "(1 such in all)", "is not part of Qwen3MoeForCausalLM"],
    ),
]


@pytest.mark.parametrize(("damage", "fragments"), ONE_FILE)
def test_broken_single_file(tmp_path: Path, damage: Callable[[Path], None], fragments: list[str]) -> None:
    check_refused(write_tiny_model(tmp_path, SMALL), damage, fragments)


SHARD = "model-00002-of-00003.safetensors"
SHARDS: list[tuple[Callable[[Path], None], list[str]]] = [
    (remove(SHARD), [f"{SHARD}: missing", INDEX, "download the missing shard"]),
    (remove(INDEX), [f"{INDEX}: missing, but there are 3 shards", "model-00001-of-00003.safetensors"]),
    (truncate(SHARD, 1000), [f"{SHARD}: truncated, 1000 bytes"]),
    (lambda directory: (directory / INDEX).write_text("{"), [f"{INDEX}: not valid JSON"]),
    (lambda directory: (directory / INDEX).write_text("{}"), [f"{INDEX}: weight_map is missing or empty"]),
    (index(lambda names: names.update({NORM: "../x.safetensors"})), [INDEX, "'../x.safetensors'", "plain"]),
    (index(lambda names: names.update({NORM: "/etc/passwd"})), [INDEX, "'/etc/passwd'"]),
    (index(lambda names: names.update({NORM: 3})), [INDEX, NORM]),
    (index(lambda names: names.update({"ghost": SHARD})), [SHARD, "does not hold tensor ghost"]),
    (index(lambda names: names.pop(NORM)), [f"tensor {NORM} is missing"]),
]


@pytest.mark.parametrize(("damage", "fragments"), SHARDS)
def test_broken_shards(tmp_path: Path, damage: Callable[[Path], None], fragments: list[str]) -> None:
    check_refused(write_tiny_model(tmp_path, replace(SMALL, num_shards=3)), damage, fragments)


def check_refused(directory: Path, damage: Callable[[Path], None], fragments: list[str]) -> None:
    open_model_files(directory)
    damage(directory)
    with pytest.raises(ModelLoadError) as caught:
        open_model_files(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    assert ";" in message, "the remedy follows a semicolon"
    for fragment in fragments:
        assert fragment in message


def test_weights_in_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(SMALL)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"holds pytorch_model.bin, .*convert it to safetensors"):
        open_model_files(tmp_path)
