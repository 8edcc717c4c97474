"""Conversion of integers with a scale per group of columns to our blocks; the values are unchanged."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.tensor_source import TensorEntry
from twofold.weights.weight_format import FORMATS, source_row_bytes

_LEAST_EXACT: Final = 2.0**-17
"""bfloat16 values of at least this size are exact in float16; smaller ones are rounded to multiples of 2^-24."""


def format_for(entry: TensorEntry, columns: int, group: int, *, nibbles: bool) -> str:
    """The format for groups of `group` columns: `nibbles` from -8 to 7, else signed 8-bit integers.

    Raises ModelLoadError if no block is as narrow as the groups.
    """
    for format in ("q4_0",) if nibbles else ("int8", "q8_0"):
        block = FORMATS[format].block_columns
        if columns % block == 0 and group % block == 0:
            return format
    raise ModelLoadError(
        f"{entry.file}: tensor {entry.name} has {columns} columns in groups of {group}, expected multiples of 32; "
        "use a GGUF file or another quantisation of this model"
    )


def made_entry(entry: TensorEntry, name: str, shape: tuple[int, int], format: str) -> TensorEntry:
    """`entry`, the first stored part, as the matrix converted from it."""
    return TensorEntry(
        name, entry.file, f"{entry.dtype} ({format})", shape, entry.offset, entry.num_bytes, format,
        recoded_bytes=math.prod(shape[:-1]) * source_row_bytes(format, shape[-1]),
    )  # fmt: skip


def as_float16(scales: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    """The scales as float16. Raises ValueError for a scale that is not a float16."""
    with np.errstate(over="ignore"):
        narrow = scales.astype(np.float16)
    rounded = (narrow != scales) & (np.abs(scales) >= _LEAST_EXACT)
    if not np.isfinite(narrow).all() or rounded.any():
        found = scales[~np.isfinite(narrow) | rounded].flat[0]
        raise ValueError(f"a scale of {found}, expected one that is exact in float16")
    return narrow


def encode(
    centred: npt.NDArray[np.int8], scales: npt.NDArray[np.float16], format: str
) -> npt.NDArray[np.uint8]:
    """`centred` [rows, columns] and `scales` [rows, groups] as rows of `format`; groups are whole blocks of it."""
    rows, columns = centred.shape
    block = FORMATS[format].block_columns
    repeat = columns // block // scales.shape[1]
    out = np.empty((rows, columns // block, FORMATS[format].block_bytes), np.uint8)
    out[..., :2] = np.repeat(scales, repeat, axis=1)[..., None].view(np.uint8)
    values = centred.reshape(rows, -1, block)
    if format == "q4_0":
        codes = (values + np.int8(8)).view(np.uint8)
        out[..., 2:] = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    else:
        out[..., 2:] = values.view(np.uint8)
    return out.reshape(-1)
