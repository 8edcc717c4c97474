"""Random damages of a model's files: a directory's JSON and safetensors, GGUF headers; of a seed always the same."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from tests.tiny_models.gguf import damaged, gguf_bytes, with_strange_metadata

Files = Mapping[str, bytes]
GgufParts = tuple[dict[str, tuple[str, Any]], list[tuple[str, Sequence[int], int, int]], bytes]
Tensors = list[tuple[str, str, list[int], bytes]]
"""(name, dtype, shape, data)."""

_RAW = {
    "<digits>": "7" * 5000, "<deep>": "[" * 50_000 + "]" * 50_000, "<long list>": json.dumps([1] * 20_000),
    "<exponent>": "1e999", "<twice>": '1, "hidden_size": 2',
}  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 31, 63, 64, 255, 256, 4095, 4096, 65_535, 65_536, 2**31 - 1, 2**31, 2**32,
    2**40, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e30, 1e308, float("inf"),
    float("-inf"), float("nan"), "", " ", "x", "1", "true", "a\nb", "\x1b[2J", "\u2028", "\ud800", "\0", "../x",
    "é" * 3000, "re:(", "re:.*", "F16", "float16", "silu", "yarn", "linear", "full_attention", "Qwen3MoeForCausalLM",
    [], {}, [[]], [{}], [None], [-1], ["a\nb"], {"a": 1}, {"\n": {}}, {"content": 3}, [0] * 300, *_RAW,
)  # fmt: skip
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4,
    "I64": 8, "F64": 8, "Q4_K": 1, "\n": 1,
}  # fmt: skip
_NAMES = (
    "", "a\nb", "\x1b[31m", "\ud800", "é" * 3000, "model.norm.weight", "lm_head.weight", "__metadata__",
    "model.layers.99999999999999999999.mlp.gate.weight", "model.layers.0.mlp.experts.-1.up_proj.weight",
)  # fmt: skip


def damage_directory(files: Files, rng: random.Random) -> dict[str, bytes | None]:
    """Changed files: new contents by name, None for a deleted file."""
    changed: dict[str, bytes | None] = {}
    names = sorted(files)
    weights = [_weight(name) for name in names]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choices(names, weights)[0]
        data = changed.get(name, files[name])
        if data is None:
            continue
        draw = rng.random()
        if draw < 0.03:
            changed[name] = rng.choice((None, None, b"", b"\0" * 100, files[rng.choice(names)]))
        elif draw < 0.2:
            header = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else len(data)
            changed[name] = damaged(data, header, rng)
        elif name.endswith(".safetensors"):
            changed[name] = _damage_safetensors(data, rng)
        elif name.endswith(".json"):
            changed[name] = _damage_json(data, rng)
        else:
            changed[name] = damaged(data, len(data), rng)
    return changed


def damage_gguf(data: bytes, data_begin: int, parts: GgufParts, rng: random.Random) -> bytes:
    """Wrong bytes, well-formed nonsense in the metadata, or tensors gone, renamed, turned or mixed up."""
    draw = rng.random()
    if draw < 0.35:
        return damaged(data, data_begin, rng)
    fields, tensors, weights = parts
    if draw < 0.75:
        return gguf_bytes(*with_strange_metadata(fields, tensors, rng), weights)
    return gguf_bytes(fields, _strange_tensors(tensors, rng), weights)


def _weight(name: str) -> int:
    if name == "config.json":
        return 50
    if name.endswith(".safetensors"):
        return 40
    return 15 if name.endswith("index.json") else 3


def _damage_json(data: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # damaged before
        return damaged(data, len(data), rng)
    return _written(_strange_json(value, rng))


def _written(value: Any) -> bytes:
    text = json.dumps(value)
    for mark, raw in _RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


def _strange_json(root: Any, rng: random.Random) -> Any:
    """One value of `root`, anywhere in it, changed, gone, renamed or in another's place."""
    node = root
    while isinstance(node, dict | list) and node:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        inner = node[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            node = inner
            continue
        draw = rng.random()
        if draw < 0.15:
            del node[key]
        elif draw < 0.2 and isinstance(node, dict):
            node[rng.choice(("x", "\n", f"{key}x", f"{key}".upper()))] = node.pop(key)
        elif draw < 0.3:
            node[key] = node[rng.choice(list(node) if isinstance(node, dict) else range(len(node)))]
        elif draw < 0.5 and isinstance(inner, int | float):
            others = (
                inner + 1,
                inner - 1,
                inner * 2,
                -inner,
                min(inner, 2**1000) / 2,
                inner * 1000,
                str(inner),
                [inner],
            )
            node[key] = rng.choice(others)
        else:
            node[key] = rng.choice(_VALUES)
        return root
    return rng.choice(_VALUES)


def _damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        if rng.random() < 0.4:
            return _with_header(_strange_json(header, rng), data[8 + length :])
        tensors = []
        for name, of_tensor in header.items():
            if name != "__metadata__":
                begin, end = of_tensor["data_offsets"]
                raw = data[8 + length + begin : 8 + length + end]
                tensors.append((name, of_tensor["dtype"], of_tensor["shape"], raw))
        return _safetensors(_other_tensors(tensors, rng))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        RecursionError,
        struct.error,
    ):  # damaged before
        return damaged(data, len(data), rng)


def _with_header(header: Any, data: bytes) -> bytes:
    text = _written(header)
    return struct.pack("<Q", len(text)) + text + data


def _safetensors(tensors: Tensors) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape, raw in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    return _with_header(header, b"".join(raw for *_, raw in tensors))


def _other_tensors(tensors: Tensors, rng: random.Random) -> Tensors:
    """A sound file of other tensors."""
    found = list(tensors)
    at = rng.randrange(len(found))
    name, dtype, shape, raw = found[at]
    kind = rng.randrange(9)
    if kind == 0:
        del found[at]
    elif kind == 1:
        found[at] = (_other_name(name, rng), dtype, shape, raw)
    elif kind == 2:
        found.append((_other_name(name, rng), dtype, shape, raw))
    elif kind == 3:  # same number of bytes
        size = math.prod(shape)
        forms = [shape[::-1], [size], [1, *shape], [*shape, 1], [size, 1], [2**40, 0], [0] * 40]
        form = rng.choice(forms)
        found[at] = (name, dtype, form, raw if math.prod(form) else b"")
    elif kind == 4:
        rows = rng.choice((0, 1, shape[0] // 2, shape[0] - 1)) if shape else 1
        of_row = len(raw) // max(1, shape[0] if shape else 1)
        found[at] = (name, dtype, [rows, *shape[1:]], raw[: rows * of_row])
    elif kind in (5, 6):
        other = rng.choice(list(_ITEM_BYTES))
        num_bytes = math.prod(shape) * _ITEM_BYTES[other]
        found[at] = (name, other, shape, (raw * 8)[:num_bytes].ljust(num_bytes, b"\0"))
    elif kind == 7:
        of = rng.randrange(len(found))
        other_name, *rest = found[of]
        found[at], found[of] = (other_name, dtype, shape, raw), (name, *rest)  # type: ignore[assignment]
    else:
        found[at] = (name, dtype, shape, rng.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * len(raw))
    return found


def _other_name(name: str, rng: random.Random) -> str:
    ways = (
        name + "x",
        name.replace(".0.", ".1."),
        name.replace("weight", "bias"),
        name + "_scale_inv",
        name[:-1],
    )
    return rng.choice((*ways, *_NAMES))


def _strange_tensors(
    tensors: Sequence[tuple[str, Sequence[int], int, int]], rng: random.Random
) -> list[tuple[str, Sequence[int], int, int]]:
    found = list(tensors)
    at, of = rng.randrange(len(found)), rng.randrange(len(found))
    name, dimensions, kind, offset = found[at]
    way = rng.randrange(6)
    if way == 0:
        del found[at]
    elif way == 1:
        names = [other for other in _NAMES if other.isprintable()] + ["a\nb", "\x1b[31m"]
        found[at] = (
            rng.choice((name + "x", name.replace("blk.0", "blk.1"), *names)),
            dimensions,
            kind,
            offset,
        )
    elif way == 2:
        found[at] = (name, dimensions[::-1], kind, offset)
    elif way == 3:
        found[at], found[of] = (found[of][0], *found[at][1:]), (name, *found[of][1:])
    elif way == 4:
        found[at] = (name, dimensions, *found[of][2:])
    else:
        found[at] = (name, [math.prod(dimensions)], kind, offset)
    return found
