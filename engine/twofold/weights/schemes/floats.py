"""Floats of 8 and 4 bits with scales, stored alike by compressed-tensors and ModelOpt.

FP8: one scale for a tensor or for each row. NVFP4: E2M1, adjacent pairs in one byte, an E4M3 scale for 16 columns and a
float32 for the tensor. ModelOpt multiplies the scales by that float32, compressed-tensors divides them. It is stored at
the head of each of our rows, negative if it divides, so that every value is rounded as in either package.

The checkpoint's activation scales (`input_scale`, `input_global_scale`) are not used: our kernels round each 32
activations with their own scale, which is closer than a scale fixed at calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.schemes import blocks
from twofold.weights.schemes.scheme import SchemeMatrix, Stored, expect, missing
from twofold.weights.tensor_source import TensorEntry, scales_name
from twofold.weights.weight_format import FORMATS, scale_grid

_RANGE: Final = 2.0**-100, 2.0**20
"""Allowed factors of a tensor's scales; the panel scales them by 2^103."""
_NAN: Final = 0x7F
_NEGATIVE_ZERO: Final = 0x80


def float8_matrix(module: str, parts: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
    """Converts only the scale: to a grid, or to one per row. Raises ModelLoadError without one of these shapes."""
    weight = parts["weight"]
    if "weight_scale" not in parts:
        raise missing(weight, f"{module}.weight_scale")
    scale = parts["weight_scale"]
    expect(weight, ("F8_E4M3",), weight.shape)
    rows = weight.shape[0] if len(weight.shape) == 2 else 0
    if rows == 0 or scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        raise ModelLoadError(
            f"{scale.file}: tensor {scale.name} is {list(scale.shape)}, expected one scale for the whole tensor or for "
            "each row; use another quantisation of this model"
        )
    expect(scale, ("BF16", "F16", "F32"), scale.shape)
    grid = scale_grid(weight.shape)
    if scale.shape[:1] == (rows,):
        grid = (rows, grid[1])

    def read(stored: Stored) -> npt.NDArray[np.float32]:
        scales = stored["weight_scale"].astype(np.float32).reshape(-1, 1)
        return np.ascontiguousarray(np.broadcast_to(scales, grid)).reshape(-1)

    made = TensorEntry(
        scales_name(f"{module}.weight"), scale.file, scale.dtype, grid, scale.offset, scale.num_bytes, "f32",
        recoded_bytes=4 * int(np.prod(grid)),
    )  # fmt: skip
    return [SchemeMatrix(made, {k: parts[k] for k in ("weight_scale", "input_scale") if k in parts}, read)]


def nvfp4_matrix(
    module: str, parts: Mapping[str, TensorEntry], of_tensor: str, *, divides: bool
) -> list[SchemeMatrix]:
    """NVFP4 matrices. `parts` begin with the codes; `of_tensor` is the tensor's scale. Raises ModelLoadError."""
    first = next(iter(parts.values()))
    shape = first.shape if len(first.shape) == 2 and 0 not in first.shape else (-1, -1)
    expect(first, ("U8",), shape)
    for part in ("weight_scale", of_tensor):
        if part not in parts:
            raise missing(first, f"{module}.{part}")
    rows, columns = shape[0], 2 * shape[1]
    block = FORMATS["nvfp4"].block_columns
    if columns % block:
        raise ModelLoadError(
            f"{first.file}: tensor {first.name} has {columns} columns, expected a multiple of {block} for NVFP4; use a "
            "GGUF file or another quantisation of this model"
        )
    expect(parts["weight_scale"], ("F8_E4M3",), (rows, columns // 16))
    whole = parts[of_tensor]
    expect(whole, ("F32",), () if whole.shape == () else (1,))
    made = blocks.made_entry(first, f"{module}.weight", (rows, columns), "nvfp4")
    return [SchemeMatrix(made, parts, partial(_read_nvfp4, next(iter(parts)), of_tensor, divides))]


def _read_nvfp4(codes: str, of_tensor: str, divides: bool, stored: Stored) -> npt.NDArray[np.uint8]:
    scales = stored["weight_scale"]
    if ((scales & _NAN) == _NAN).any() or (scales > _NEGATIVE_ZERO).any():
        raise ValueError("a scale that is negative or not a number")
    return nvfp4_rows(stored[codes], scales, head_of(float(stored[of_tensor].reshape(-1)[0]), divides))


def head_of(scale: float, divides: bool) -> float:
    """A tensor's scale as the head of our rows. Raises ValueError for an invalid scale."""
    least, most = _RANGE
    multiplier = 1 / scale if divides and scale else scale
    if not (least <= multiplier <= most or (multiplier == 0 and not divides)):
        raise ValueError(f"a tensor's scale of {scale}, expected a positive number")
    return -scale if divides else scale


def nvfp4_rows(
    codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], head: float
) -> npt.NDArray[np.uint8]:
    """Rows of our format: `codes` [rows, columns / 2] of adjacent pairs, `scales` [rows, columns / 16]."""
    rows, half = codes.shape
    out = np.empty(rows, row_type(2 * half))
    out["head"] = head
    out["blocks"]["scales"] = scales.reshape(rows, -1, 4)
    # Within 16 columns, byte i has columns i and i + 8.
    pairs = codes.reshape(rows, -1, 4, 8)
    first, last = pairs[..., :4], pairs[..., 4:]
    q = out["blocks"]["q"]
    q[..., 0::2] = first & 0x0F | last << np.uint8(4)
    q[..., 1::2] = first >> np.uint8(4) | last & 0xF0
    return out.view(np.uint8)


def row_type(columns: int) -> np.dtype[Any]:
    """A row of `columns` weights (kernels/include/twofold/formats/nvfp4.h)."""
    block = np.dtype([("scales", np.uint8, 4), ("q", np.uint8, (4, 8))])
    return np.dtype([("head", "<f4"), ("blocks", block, (columns // 64,))])
