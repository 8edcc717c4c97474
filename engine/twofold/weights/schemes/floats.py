"""Floats of 8, 6 and 4 bits with scales, as compressed-tensors, ModelOpt and transformers store them.

FP8 (E4M3): scales for the tensor, for rows, or for blocks. Those that our grid of 128 columns can hold are converted;
the codes stay in the file.

NVFP4: E2M1, adjacent pairs in one byte, an E4M3 scale for 16 columns and a float32 for the tensor. ModelOpt multiplies
the scales by that float32, compressed-tensors divides them. It is stored at the head of each of our rows, negative if
it divides, so that every value is rounded as in either package.

MXFP4: E2M1 with an exponent for 32 columns, read as it is. All others become bfloat16 if their scales are powers of
two, which is exact, else float16.

The checkpoint's activation scales (`input_scale`, `input_global_scale`) are not used: our kernels round each 32
activations with their own scale, which is closer than a scale fixed at calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.schemes.granularity import EXPONENTS, Grid, grid_of, scale_values
from twofold.weights.schemes.integers import made_entry
from twofold.weights.schemes.scheme import SchemeMatrix, Stored, expect, missing
from twofold.weights.tensor_source import TensorEntry, scales_name
from twofold.weights.weight_format import FORMATS, SCALE_GRID

_RANGE: Final = 2.0**-100, 2.0**20
"""Allowed factors of a tensor's scales; the panel scales them by 2^103."""
_NAN: Final = 0x7F
_NEGATIVE_ZERO: Final = 0x80


def _minifloats(exponent_bits: int, fraction_bits: int, bias: int) -> npt.NDArray[np.float32]:
    """Values of all codes of a float without infinities."""
    codes = np.arange(1 << (1 + exponent_bits + fraction_bits))
    fraction = (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    exponent = codes >> fraction_bits & ((1 << exponent_bits) - 1)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.where(codes >> (exponent_bits + fraction_bits), -size, size).astype(np.float32)


_E4M3: Final = _minifloats(4, 3, 7)
_E4M3[[_NAN, _NAN | 0x80]] = np.nan
_E2M3: Final = _minifloats(2, 3, 1)
_E2M1: Final = _minifloats(2, 1, 1)


def float8_matrix(
    name: str, parts: Mapping[str, TensorEntry], scale: str, *stated: Grid
) -> list[SchemeMatrix]:
    """FP8 matrices or stacks of them, tensor `name`: `parts` begin with the codes; `scale` names the part with scales.

    `stated`: grids that the configuration states. Raises ModelLoadError for another type or shape.
    """
    first, weight = next(iter(parts.items()))
    expect(weight, ("F8_E4M3",), weight.shape)
    if scale not in parts:
        raise missing(weight, f"{weight.name.removesuffix(first)}{scale}")
    if len(weight.shape) < 2 or 0 in weight.shape:
        raise ModelLoadError(
            f"{weight.file}: tensor {weight.name} has shape {list(weight.shape)}, expected a matrix; weights and "
            "configuration belong to different models"
        )
    grid = grid_of(parts[scale], weight.shape, *stated)
    for cells in (Grid(SCALE_GRID, SCALE_GRID), Grid(1, SCALE_GRID)):
        if cells.within(grid, weight.shape):
            return [_scales_of_float8(name, parts, scale, grid, cells)]
    return [_values(name, parts, scale, grid, lambda codes: _E4M3[codes])]


def _scales_of_float8(
    name: str, parts: Mapping[str, TensorEntry], scale: str, grid: Grid, cells: Grid
) -> SchemeMatrix:
    """The scales alone, one for each of `cells`."""
    weight, of_file = next(iter(parts.values())), parts[scale]
    shape = cells.counts(weight.shape)

    def read(stored: Stored) -> npt.NDArray[np.float32]:
        scales = scale_values(of_file, stored[scale]).astype(np.float32)
        return np.ascontiguousarray(grid.spread(scales, weight.shape, cells)).reshape(-1)

    made = replace(made_entry(of_file, scales_name(name), shape, "f32"), dtype=of_file.dtype)
    others = {part: entry for part, entry in parts.items() if entry is not weight and part != scale}
    return SchemeMatrix(made, {scale: of_file} | others, read)


def mx_matrix(
    name: str, parts: Mapping[str, TensorEntry], scale: str, bits: int, *stated: Grid
) -> list[SchemeMatrix]:
    """A matrix of E2M1 (4 bits, adjacent pairs in a byte) or E2M3 (6 bits, four in three bytes), with scales of any
    type. Raises ModelLoadError as `float8_matrix`."""
    part, first = next(iter(parts.items()))
    shape = first.shape if len(first.shape) == 2 and 0 not in first.shape else (-1, -1)
    expect(first, ("U8",), shape)
    if scale not in parts:
        raise missing(first, f"{first.name.removesuffix(part)}{scale}")
    columns = shape[1] * 8 // bits
    grid = grid_of(parts[scale], (shape[0], columns), *stated)
    block = FORMATS["mxfp4"].block_columns
    if bits == 4 and parts[scale].dtype in EXPONENTS and grid == Grid(1, block) and columns % block == 0:
        made = replace(first, name=name, dtype="MXFP4", shape=(shape[0], columns), format="mxfp4")
        made = replace(made, scales=parts[scale].name)
        others = {each: entry for each, entry in parts.items() if each != scale}
        return [SchemeMatrix(made, others, lambda stored: stored[part].reshape(-1))]
    decode = _pairs if bits == 4 else _fours
    return [_values(name, parts, scale, grid, decode, (shape[0], columns))]


def _pairs(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    values = np.stack([_E2M1[codes & 0x0F], _E2M1[codes >> 4]], axis=-1)
    return values.reshape(*codes.shape[:-1], -1)


def _fours(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    bytes_ = codes.reshape(*codes.shape[:-1], -1, 3).astype(np.uint32)
    words = bytes_[..., 0] | bytes_[..., 1] << np.uint32(8) | bytes_[..., 2] << np.uint32(16)
    each = [words >> np.uint32(shift) & np.uint32(0x3F) for shift in (0, 6, 12, 18)]
    values: npt.NDArray[np.float32] = _E2M3[np.stack(each, axis=-1)]
    return values.reshape(*codes.shape[:-1], -1)


def _values(
    name: str,
    parts: Mapping[str, TensorEntry],
    scale: str,
    grid: Grid,
    decode: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]],
    shape: tuple[int, ...] | None = None,
) -> SchemeMatrix:
    """Codes times scales as 16-bit floats."""
    (part, first), of_scale = next(iter(parts.items())), parts[scale]
    shape = shape or first.shape
    format = "bf16" if of_scale.dtype in EXPONENTS else "f16"

    def read(stored: Stored) -> npt.NDArray[np.uint16]:
        scales = scale_values(of_scale, stored[scale]).reshape(-1, *grid.counts(shape)[-2:])
        codes = stored[part].reshape(len(scales), shape[-2], -1)
        out = np.empty((len(scales), *shape[-2:]), np.uint16)
        for matrix, code, scales_of_it in zip(out, codes, scales, strict=True):
            values = decode(code)
            values *= grid.spread(scales_of_it.astype(np.float32), shape[-2:], Grid(1, 1))
            matrix[:] = _as_16_bits(values, format)
        return out.reshape(-1)

    exactly = "bfloat16, which is exact" if format == "bf16" else "float16"
    remark = f"no format here has floats of {first.dtype} with a scale for {grid}, so values are loaded as {exactly}"
    return SchemeMatrix(made_entry(first, name, shape, format), parts, read, remark=remark)


def _as_16_bits(values: npt.NDArray[np.float32], format: str) -> npt.NDArray[np.uint16]:
    if format == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)  # exact, so nothing is cut off


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
    made = made_entry(first, f"{module}.weight", (rows, columns), "nvfp4")
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
