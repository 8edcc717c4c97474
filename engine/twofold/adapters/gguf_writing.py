"""Writes an adapter as llama.cpp's GGUF adapter; `gguf_adapters` reads it and says what its tensors are."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from twofold.adapters.adapter import F32, Adapter, LowRank
from twofold.adapters.base_shapes import BaseShapes, GgufMatrix
from twofold.adapters.writing import by_layer, stacked
from twofold.api.errors import ConfigError
from twofold.api.whole_file import whole_file

_ALIGNMENT: Final = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_F32: Final = 0
_EMBEDDING: Final = "token_embd.weight"
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_STACKS: Final = {"gate_proj": "gate_exps", "up_proj": "up_exps", "down_proj": "down_exps"}


def write_gguf(adapter: Adapter, base: BaseShapes, path: Path, *, architecture: str) -> None:
    """Write `path`, whole or not at all. Scales are factors of B, so alpha is 0, which stands for a scale of 1.

    Raises ConfigError for a matrix that the form has no place for.
    """
    if adapter.replaced:
        raise ConfigError(
            f"adapter {adapter.name} replaces {min(adapter.replaced)} as a whole, which a GGUF adapter cannot; merge it"
        )
    single, routed = by_layer(adapter, base)
    tensors = _matrices(adapter, single, base)
    for layer, parts in routed.items():
        number = _LAYER.search(layer)
        if number is None:
            raise ConfigError(f"adapter {adapter.name} changes {layer}, which has no number in GGUF files")
        for part, products in parts.items():
            name = f"blk.{number[1]}.ffn_{_STACKS[part]}.weight"
            tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = stacked(
                products, base.experts[layer].shape(part)
            )
    fields: dict[str, str | float | int] = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "general.name": adapter.name,
        "adapter.type": "lora",
        "adapter.lora.alpha": 0.0,
    }
    with whole_file(path) as part_file, part_file.open("wb") as stream:
        _write(stream, fields, tensors)


def _matrices(adapter: Adapter, single: Mapping[str, LowRank], base: BaseShapes) -> dict[str, F32]:
    """Factors of all matrices but routed experts, by their names in the file."""
    tensors: dict[str, F32] = {}
    placed: set[str] = set()
    for name, matrices in base.gguf.items():
        found = [matrix for matrix in matrices if matrix.name in single]
        if not found:
            continue
        placed |= {matrix.name for matrix in found}
        if name == _EMBEDDING:
            product = single[found[0].name]
            tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = product.b, product.a.T
            continue
        tensors[f"{name}.lora_a"] = np.concatenate([single[matrix.name].a for matrix in found])
        tensors[f"{name}.lora_b"] = _rows(found, single)
    if missing := single.keys() - placed:
        raise ConfigError(
            f"adapter {adapter.name} changes {min(missing)}, whose rows GGUF files hold in another order; write peft"
        )
    return tensors


def _rows(found: list[GgufMatrix], single: Mapping[str, LowRank]) -> F32:
    """B of a tensor that one or several matrices are, each in columns of its own."""
    whole = found[0].rows[1] if found[0].rows else len(single[found[0].name].b)
    b = np.zeros((whole, sum(single[matrix.name].rank for matrix in found)), np.float32)
    column = 0
    for matrix in found:
        part, rank = single[matrix.name].b, single[matrix.name].rank
        if matrix.heads:  # row half * d/2 + i of a head becomes row 2i + half
            part = part.reshape(matrix.heads, 2, -1, rank).swapaxes(1, 2).reshape(-1, rank)
        first = matrix.rows[0] if matrix.rows else 0
        b[first : first + len(part), column : column + rank] = part
        column += rank
    return b


def _write(stream: BinaryIO, fields: Mapping[str, Any], tensors: Mapping[str, F32]) -> None:
    """The file: counts, fields, where each tensor lies, then the tensors."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
    for key, value in fields.items():
        head += _text(key)
        if isinstance(value, str):
            head += struct.pack("<I", _STRING) + _text(value)
        else:
            head += struct.pack("<If", _FLOAT32, value)
    offset = 0
    for name, values in tensors.items():
        head += _text(name) + struct.pack("<I", values.ndim)
        head += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        head += struct.pack("<IQ", _F32, offset)
        offset += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
    stream.write(head + bytes(-len(head) % _ALIGNMENT))
    for values in tensors.values():
        stream.write(np.ascontiguousarray(values, "<f4").tobytes())
        stream.write(bytes(-values.nbytes % _ALIGNMENT))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw
