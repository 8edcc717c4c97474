"""Damaged adapters of every layout: each is read or refused in one line, and nothing else happens."""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from twofold.adapters.base_shapes import BaseExperts, BaseShapes, GgufMatrix
from twofold.adapters.reading import read_adapter
from twofold.api.errors import ModelLoadError

from tests.adapters.adapter_files import (
    COUNT,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYER,
    MATRICES,
    PREFIX,
    TOKENS,
    factors,
    flat,
    numbers,
    write,
)
from tests.adapters.gguf_files import write_gguf_adapter
from tests.adapters.ktransformers_files import fused, write_kt, write_manifest

Q: Final = f"{LAYER}.self_attn.q_proj"
BASE: Final = BaseShapes(
    MATRICES,
    {EXPERTS: BaseExperts(COUNT, HIDDEN, INNER)},
    gguf={
        "blk.0.attn_q.weight": (GgufMatrix(Q, None, 2),),
        "token_embd.weight": (GgufMatrix("model.embed_tokens"),),
    },
    architecture="qwen3moe",
)
MOST_SECONDS: Final = 5.0
MOST_BYTES: Final = 200 << 20
JUNK: Final = (
    None,
    True,
    -1,
    0,
    1,
    3,
    1e400,
    2**70,
    "",
    "x",
    "\n",
    "a" * 5000,
    [],
    [[1]],
    {},
    {"q_proj": "(((("},
    {"a": {}},
)


def peft(directory: Path) -> Path:
    embedding = f"{PREFIX}model.embed_tokens.lora_embedding_"
    tensors = factors(Q, 8, HIDDEN) | {f"{PREFIX}lm_head.weight": numbers(TOKENS, HIDDEN)}
    tensors |= {f"{embedding}A": numbers(2, TOKENS), f"{embedding}B": numbers(HIDDEN, 2)}
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r".*q_proj": 5}}
    return write(directory, tensors, **patterns, use_rslora=True)


def one_by_one(directory: Path) -> Path:
    parts = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    modules = ((f"{EXPERTS}.{n}.{part}", shape) for n in range(COUNT) for part, shape in parts.items())
    return write(directory, {k: v for module, shape in modules for k, v in factors(module, *shape).items()})


def stacked(directory: Path) -> Path:
    name = f"{PREFIX}{EXPERTS}."
    tensors = {
        f"{name}w1.lora_A.weight": numbers(1, 2, HIDDEN),
        f"{name}w1.lora_B.weight": numbers(COUNT, INNER, 2),
    }
    tensors |= {
        f"{name}w2.lora_A.weight": numbers(COUNT, 2, INNER),
        f"{name}w2.lora_B.weight": numbers(1, HIDDEN, 2),
    }
    return write(directory, tensors)


def gguf(directory: Path) -> Path:
    directory.mkdir()
    tensors = {
        f"token_embd.weight.lora_{side}": numbers(size, 2) for side, size in (("a", TOKENS), ("b", HIDDEN))
    }
    tensors |= {"blk.0.attn_q.weight.lora_a": numbers(2, HIDDEN), "blk.0.attn_q.weight.lora_b": numbers(8, 2)}
    name = "blk.0.ffn_up_exps.weight.lora_"
    tensors |= {f"{name}a": numbers(COUNT, 2, HIDDEN), f"{name}b": numbers(COUNT, INNER, 2)}
    return write_gguf_adapter(directory / "a.gguf", tensors)


LAYOUTS: Final[dict[str, Callable[[Path], Path]]] = {
    "PEFT": peft,
    "one by one": one_by_one,
    "flat": lambda directory: write(directory, flat()[0]),
    "stacked": stacked,
    "KTransformers": lambda directory: write_kt(directory, fused()),
    "KTransformers' manifest": lambda directory: write_manifest(write_kt(directory, fused())),
    "GGUF": gguf,
}


def damage(path: Path, draw: random.Random) -> str:
    """Damage an adapter's file in one way; returns which."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    file = draw.choice(files)
    raw = bytearray(file.read_bytes())
    kind = draw.choice(["flip", "flip early", "cut", "append", "remove", "edit", "edit", "edit"])
    if kind.startswith("flip"):
        end = min(len(raw), 400) if kind == "flip early" else len(raw)
        for _ in range(draw.randint(1, 8)):
            raw[draw.randrange(end)] = draw.randrange(256)
    elif kind == "cut":
        raw = raw[: draw.randrange(len(raw))]
    elif kind == "append":
        raw += draw.randbytes(draw.randint(1, 100))
    elif kind == "remove":
        file.unlink()
        return f"{file.name}: removed"
    elif file.suffix == ".json":
        raw = bytearray(json.dumps(edited(json.loads(raw), draw)).encode())
    elif file.suffix == ".safetensors":
        (length,) = struct.unpack("<Q", raw[:8])
        text = json.dumps(edited_header(json.loads(raw[8 : 8 + length]), draw)).encode()
        raw = bytearray(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    file.write_bytes(raw)
    return f"{file.name}: {kind}"


def edited(value: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A JSON object with one value, at any depth, replaced or removed."""
    inner = [key for key, each in value.items() if isinstance(each, dict) and each]
    if inner and draw.random() < 0.5:
        key = draw.choice(inner)
        return value | {key: edited(value[key], draw)}
    key = draw.choice([*value, "use_dora", "peft_type", "alpha_pattern", "lora_B_layout"])
    if draw.random() < 0.2:
        return {each: kept for each, kept in value.items() if each != key}
    return value | {key: draw.choice(JUNK)}


def edited_header(header: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A safetensors header with one entry changed."""
    name = draw.choice(list(header))
    entry = dict(header[name])
    kind = draw.choice(["swap", "merge", "dtype", "rename", "exchange", "remove", "shape", "offsets"])
    if kind == "swap":
        entry["shape"] = entry["shape"][::-1]
    elif kind == "merge":
        entry["shape"] = [*entry["shape"][:-2], int(np.prod(entry["shape"][-2:]))]
    elif kind == "dtype":
        entry["dtype"] = draw.choice(["I32", "F16", "U8", "F64", "x", None])
    elif kind == "shape":
        entry["shape"] = draw.choice([[], [0], [-1], [2**40, 2**40], [True], "x", None, [*entry["shape"], 1]])
    elif kind == "offsets":
        entry["data_offsets"] = draw.choice([[0, 0], [0, 2**50], [8, 0], [], None])
    elif kind in ("rename", "remove"):
        del header[name]
        characters = list(name)
        characters[draw.randrange(len(name))] = draw.choice("aAbB019._\n\u0660é")
        return header if kind == "remove" else header | {"".join(characters): entry}
    other = draw.choice(list(header))
    if kind == "exchange":
        return header | {name: header[other], other: header[name]}
    return header | {name: entry}


def refusal(path: Path, what: str) -> str:
    """The message of the error of reading an adapter; empty if it is read."""
    try:
        adapter = read_adapter(path, BASE)
    except ModelLoadError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    for product in adapter.products.values():
        assert np.isfinite(product.a).all(), what
        assert np.isfinite(product.b).all(), what
    return ""


def read_damaged(layout: str, numbers_of_damage: range, directory: Path) -> int:
    """Damage an adapter in as many ways; returns how many are refused."""
    whole = LAYOUTS[layout](directory / "whole")
    read_adapter(whole, BASE)
    refused = 0
    for number in numbers_of_damage:
        draw = random.Random(f"{layout} {number}")
        copy = directory / "copy"
        shutil.copytree(directory / "whole", copy)
        path = copy if whole.is_dir() else copy / whole.name
        kind = damage(path, draw)
        begin = time.monotonic()
        message = refusal(path, f"{layout}, damage {number}, {kind}")
        assert time.monotonic() - begin < MOST_SECONDS, kind
        assert message.isprintable(), kind
        assert len(message) < 2100, kind
        refused += message != ""
        shutil.rmtree(copy)
    return refused


def check(layout: str, count: int, directory: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = read_damaged(layout, range(count), directory)
    assert count // 4 < refused < count
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_adapters(tmp_path: Path, layout: str) -> None:
    check(layout, 80, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_thousand_damaged_adapters(tmp_path: Path, layout: str) -> None:
    check(layout, 10_000 // len(LAYOUTS) + 1, tmp_path)
