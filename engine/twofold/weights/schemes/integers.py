"""Conversion of integers with a scale for each group of columns to our blocks.

The values are unchanged where a block has the range and lies within a group. Others become float16 values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.weights.schemes.granularity import Grid
from twofold.weights.tensor_source import TensorEntry
from twofold.weights.weight_format import FORMATS, source_row_bytes

_LEAST_EXACT: Final = 2.0**-17
"""bfloat16 values of at least this size are exact in float16; smaller ones are rounded to multiples of 2^-24."""
_RANGES: Final = {"q4_0": (-8, 7), "int8": (-128, 127), "q8_0": (-128, 127)}
"""Formats with a float16 scale per block, the narrowest and the widest blocks first, and their integers."""


@dataclass(frozen=True)
class Integers:
    """A matrix of integers, less their zero points, from `lowest` to `highest`."""

    lowest: int
    highest: int
    grid: Grid
    in_order: bool = True
    """Whether a group has adjacent columns."""
    wide_scales: bool = False
    """Whether scales are float32, which blocks round to float16."""

    def format(self, columns: int) -> str:
        """Format of rows of so many columns."""
        for format, (low, high) in _RANGES.items():
            block = FORMATS[format].block_columns
            fits = low <= self.lowest and self.highest <= high and columns % block == 0
            if fits and self.in_order and Grid(1, block).within(self.grid, (1, columns)):
                return format
        return "f16"

    def remark(self, columns: int) -> str:
        """What differs from the checkpoint's values; "": nothing."""
        if self.format(columns) != "f16":
            return "float32 scales are rounded to float16" if self.wide_scales else ""
        if not self.in_order:
            return "its columns are sorted into groups, so its values are loaded as float16"
        return f"no block has its integers with a scale for {self.grid}, so its values are loaded as float16"

    def encode(
        self, codes: npt.NDArray[np.int16], scales: npt.NDArray[Any], group_of: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Rows of `codes` [rows, columns] with `scales` of the grid. group_of: each column's group, if not in order.

        Raises ValueError for an integer out of range, or a scale that float16 cannot hold.
        """
        if codes.min(initial=0) < self.lowest or codes.max(initial=0) > self.highest:
            raise ValueError(
                f"an integer that is not from {self.lowest} to {self.highest} from its zero point"
            )
        format = self.format(codes.shape[1])
        if format == "f16":
            return self._values(codes, scales, group_of)
        return self._blocks(codes, as_float16(scales, rounds=self.wide_scales), format)

    def _values(
        self, codes: npt.NDArray[np.int16], scales: npt.NDArray[Any], group_of: npt.NDArray[Any] | None
    ) -> npt.NDArray[np.uint16]:
        by_group = scales.astype(np.float32)
        if group_of is None:
            by_group = self.grid.spread(by_group, codes.shape, Grid(1, 1))
        else:
            by_group = by_group[:, group_of]
        with np.errstate(over="ignore"):
            return (codes * by_group).astype(np.float16).reshape(-1).view(np.uint16)

    def _blocks(
        self, codes: npt.NDArray[np.int16], scales: npt.NDArray[np.float16], format: str
    ) -> npt.NDArray[np.uint8]:
        rows, columns = codes.shape
        block = FORMATS[format].block_columns
        out = np.empty((rows, columns // block, FORMATS[format].block_bytes), np.uint8)
        by_block = self.grid.spread(scales, codes.shape, Grid(1, block))
        out[..., :2] = by_block[..., None].view(np.uint8)
        values = codes.astype(np.int8).reshape(rows, -1, block)
        if format == "q4_0":
            nibbles = (values + np.int8(8)).view(np.uint8)
            out[..., 2:] = nibbles[..., :16] | nibbles[..., 16:] << np.uint8(4)
        else:
            out[..., 2:] = values.view(np.uint8)
        return out.reshape(-1)


def made_entry(entry: TensorEntry, name: str, shape: tuple[int, ...], format: str) -> TensorEntry:
    """`entry`, the first stored part, as the matrix converted from it."""
    return TensorEntry(
        name, entry.file, f"{entry.dtype} ({format})", shape, entry.offset, entry.num_bytes, format,
        recoded_bytes=math.prod(shape[:-1]) * source_row_bytes(format, shape[-1]),
    )  # fmt: skip


def as_float16(scales: npt.NDArray[Any], *, rounds: bool = False) -> npt.NDArray[np.float16]:
    """The scales as float16. Raises ValueError for one too large, or one that is not a float16 unless it `rounds`."""
    with np.errstate(over="ignore"):
        narrow = scales.astype(np.float16)
    refused = ~np.isfinite(narrow)
    if not rounds:
        refused |= (narrow != scales) & (np.abs(scales) >= _LEAST_EXACT)
    if refused.any():
        raise ValueError(f"a scale of {scales[refused].flat[0]}, expected one that is exact in float16")
    return narrow
