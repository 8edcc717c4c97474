"""A tiny model's FP8 checkpoint and the float32 one of the same values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.tiny_models.writing import (
    TinyModel,
    tiny_config,
    tiny_weights,
    write_safetensors,
    write_tiny_model,
)

LARGEST = 448.0


def e4m3_values() -> npt.NDArray[np.float32]:
    """Values of the 256 codes: 4 bits of exponent with bias 7, 3 of fraction, no infinities."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -size, size)).astype(np.float32)


def to_fp8(weight: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """The nearest codes and a scale for each 128 x 128 weights."""
    rows, columns = weight.shape
    grid = np.empty((-(-rows // 128), -(-columns // 128)), np.float32)
    codes = np.empty(weight.shape, np.uint8)
    values = e4m3_values()
    finite = np.flatnonzero(np.isfinite(values))
    order = finite[np.argsort(values[finite], kind="stable")]
    middles = (values[order][1:] + values[order][:-1]) / 2
    for i, j in np.ndindex(grid.shape):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        grid[i, j] = np.abs(weight[block]).max() / LARGEST
        codes[block] = order[np.searchsorted(middles, weight[block] / grid[i, j])]
    return codes, grid


def write_both(root: Path, model: TinyModel) -> tuple[Path, Path]:
    """The model in FP8, and in float32 with the values that FP8 left."""
    eight: dict[str, Any] = {}
    exact: dict[str, Any] = {}
    for name, weight in tiny_weights(model).items():
        eight[name] = exact[name] = weight
        if ("_proj" in name or ".experts." in name) and name.endswith(".weight"):
            codes, grid = to_fp8(weight)
            eight |= {name: codes, f"{name}_scale_inv": grid}
            rows, columns = weight.shape
            exact[name] = e4m3_values()[codes] * grid.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    directories = []
    for kind, weights in (("fp8", eight), ("float32", exact)):
        directories.append(write_tiny_model(root / kind, model))
        write_safetensors(directories[-1] / "model.safetensors", weights, "float32")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = tiny_config(model) | {"quantization_config": quantization}
    (directories[0] / "config.json").write_text(json.dumps(config))
    return directories[0], directories[1]
