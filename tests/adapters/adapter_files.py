"""A small base model, and adapters of it written by hand: named float32 tensors and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from twofold.adapters.adapter import Adapter
from twofold.adapters.base_shapes import BaseExperts, BaseShapes
from twofold.adapters.reading import read_adapter

Tensors = dict[str, npt.NDArray[Any]]

LAYER: Final = "model.layers.0"
EXPERTS: Final = f"{LAYER}.mlp.experts"
PREFIX: Final = "base_model.model."
COUNT, HIDDEN, INNER, TOKENS = 3, 6, 4, 10
MATRICES: Final = {
    f"{LAYER}.self_attn.q_proj": (8, HIDDEN),
    f"{LAYER}.self_attn.o_proj": (HIDDEN, 8),
    "model.embed_tokens": (TOKENS, HIDDEN),
    "lm_head": (TOKENS, HIDDEN),
}
CONFIG: Final = {
    "peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 4, "bias": "none",
    "base_model_name_or_path": "org/base",
}  # fmt: skip
SCALE: Final = 2.0


def base(*, inner: int = INNER, **experts: bool) -> BaseShapes:
    """The base model; `experts`: how fused gate and up are kept."""
    return BaseShapes(MATRICES, {EXPERTS: BaseExperts(COUNT, HIDDEN, inner, **experts)})


def numbers(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


def factors(module: str, rows: int, columns: int, rank: int = 2) -> Tensors:
    """A pair of one module."""
    seed = sum(module.encode())
    return {
        f"{PREFIX}{module}.lora_A.weight": numbers(rank, columns, seed=seed),
        f"{PREFIX}{module}.lora_B.weight": numbers(rows, rank, seed=seed + 1),
    }


def flat(
    *, inner: int = INNER, columns_by_expert: bool = False, swapped: bool = False
) -> tuple[Tensors, dict[str, npt.NDArray[np.float32]]]:
    """PEFT's flat pairs of the layer, and the change of each expert's fused gate and up, and of its down."""
    tensors: Tensors = {}
    expected: dict[str, npt.NDArray[np.float32]] = {}
    for place, part, rows, columns in (
        ("base_layer.", "gate_up", 2 * inner, HIDDEN),
        ("", "down", HIDDEN, inner),
    ):
        out, into = (columns, rows) if swapped else (rows, columns)
        a, b = numbers(COUNT, 2, into, seed=rows), numbers(COUNT, out, 2, seed=columns)  # by expert
        order = (1, 0, 2) if columns_by_expert else (1, 2, 0)
        tensors[f"{PREFIX}{EXPERTS}.{place}lora_A.weight"] = a.reshape(COUNT * 2, into)
        tensors[f"{PREFIX}{EXPERTS}.{place}lora_B.weight"] = b.transpose(order).reshape(out, COUNT * 2)
        for number in range(COUNT):
            change = SCALE * (b[number] @ a[number])
            expected[f"{EXPERTS}.{number}.{part}"] = change.T if swapped else change
    return tensors, expected


def write(directory: Path, tensors: Mapping[str, npt.NDArray[Any]], **settings: Any) -> Path:
    """Save tensors, and the settings with `settings` in their place; a setting of None is left out."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in {**CONFIG, **settings}.items() if value is not None}
    (directory / "adapter_config.json").write_text(json.dumps(kept))
    save_file(
        {name: np.ascontiguousarray(values) for name, values in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    return directory


def read(
    directory: Path, tensors: Mapping[str, npt.NDArray[Any]], model: BaseShapes | None = None, **settings: Any
) -> Adapter:
    """The adapter that is read after `write`."""
    return read_adapter(write(directory, tensors, **settings), model or base())


def changes(adapter: Adapter) -> dict[str, npt.NDArray[np.float32]]:
    """b @ a by name."""
    return {name: product.b @ product.a for name, product in adapter.products.items()}
