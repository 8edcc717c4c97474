"""Which weights share a scale: all of a tensor, those of a row, of a group of columns, or of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.tensor_source import TensorEntry

EXPONENTS: Final = ("U8", "F8_E8M0")
"""Types of scales that are powers of two (E8M0)."""
SCALES: Final = ("BF16", "F16", "F32", *EXPONENTS)
_EXPONENT_BIAS: Final = 127
_EXPONENT_NAN: Final = 255


@dataclass(frozen=True)
class Grid:
    """Rows and columns of weights that share a scale; 0: all of the matrix."""

    rows: int
    columns: int

    def __str__(self) -> str:
        if self.columns == 0:
            return "each row" if self.rows == 1 else "the whole tensor"
        return (
            f"{self.columns} columns of each row"
            if self.rows == 1
            else f"{self.rows} x {self.columns} weights"
        )

    def counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Scales of a matrix or a stack of them of this shape."""
        sizes = zip(shape[-2:], (self.rows, self.columns), strict=True)
        return (*shape[:-2], *(-(-size // each) if each else 1 for size, each in sizes))

    def within(self, other: Grid, shape: tuple[int, ...]) -> bool:
        """Whether every cell of this grid lies in one cell of `other`, in a matrix of this shape."""
        sides = zip((self.rows, self.columns), (other.rows, other.columns), shape[-2:], strict=True)
        return all(
            theirs == 0 or theirs >= size or (ours and theirs % ours == 0) for ours, theirs, size in sides
        )

    def spread(self, scales: npt.NDArray[Any], shape: tuple[int, ...], cells: Grid) -> npt.NDArray[Any]:
        """The scale of each of `cells`, which lie within this grid."""
        scales = scales.reshape(self.counts(shape))
        for axis, size, ours, theirs in (
            (-2, shape[-2], cells.rows, self.rows), (-1, shape[-1], cells.columns, self.columns),
        ):  # fmt: skip
            begins = np.arange(0, size, ours or size)
            scales = scales.take(begins // theirs if theirs else 0 * begins, axis)
        return scales


TENSOR: Final = Grid(0, 0)
ROW: Final = Grid(1, 0)


def grid_of(scale: TensorEntry, shape: tuple[int, ...], *stated: Grid) -> Grid:
    """The first grid that the scales' shape fits, for weights of this shape: one of those stated, the whole tensor, or
    rows. Raises ModelLoadError if none does, and for other types."""
    if scale.dtype not in SCALES:
        raise ModelLoadError(
            f"{scale.file}: tensor {scale.name} is {scale.dtype} {list(scale.shape)}, expected "
            f"{' or '.join(SCALES)} by its quantisation; weights and configuration belong to different models"
        )
    known = (*stated, TENSOR, ROW)
    for grid in known:
        counts = grid.counts(shape)
        # Scales of one column, or of one tensor, may lack the dimensions of length one.
        fitting = {counts} | ({counts[:-1]} if counts[-1] == 1 else set())
        if counts[-2:] == (1, 1):
            fitting |= {counts[:-2], (1,) if len(shape) == 2 else counts[:-2]}
        if scale.shape in fitting:
            return grid
    raise ModelLoadError(
        f"{scale.file}: tensor {scale.name} has shape {list(scale.shape)}, expected a scale for "
        f"{' or for '.join(dict.fromkeys(map(str, known)))} of {list(shape)}; weights and configuration belong to "
        "different models"
    )


def scale_values(entry: TensorEntry, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scales as floats: powers of two from their exponents. Raises ValueError for one that is not a number."""
    if entry.dtype not in EXPONENTS:
        return stored
    if (stored == _EXPONENT_NAN).any():
        raise ValueError("a scale that is not a number")
    return np.ldexp(np.float32(1), stored.astype(np.int32) - _EXPONENT_BIAS)
