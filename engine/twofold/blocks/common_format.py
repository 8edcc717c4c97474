"""One format for the experts of a layer whose matrices are stored in several: offsets inside an expert are per layer.

Blocks of integers become q8_0, which holds them exactly. Where floats are among them, all become the widest of these
floats: their own values are exact, those of quantised experts are rounded to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.weights.weight_format import ExpertsOnDemand, ExpertWeights, WeightMatrix

_INTEGERS: Final = ("q4_0", "int8", "q8_0")
_BLOCK: Final = 32
"""Columns of a block of q8_0."""


def common_format(formats: Iterable[str]) -> str:
    """The format to which matrices in `formats` are converted."""
    found = set(formats)
    if len(found) == 1:
        return found.pop()
    if found <= set(_INTEGERS):
        return "q8_0"
    if "f32" in found or {"f16", "bf16"} <= found:
        return "f32"
    return "bf16" if "bf16" in found else "f16"


class UnitedExperts(ExpertsOnDemand):
    """Experts in the same three formats, converted on every request."""

    def __init__(self, experts: Sequence[ExpertWeights], formats: tuple[str, str, str]) -> None:
        self._experts, self._formats = experts, formats
        self._pool = ops.ThreadPool(1)

    def __len__(self) -> int:
        return len(self._experts)

    def expert(self, index: int) -> ExpertWeights:
        gate, up, down = (
            matrix if matrix.format == format else _converted(self._pool, matrix, format)
            for matrix, format in zip(self._experts[index], self._formats, strict=True)
        )
        return gate, up, down


def _converted(pool: ops.ThreadPool, matrix: WeightMatrix, format: str) -> WeightMatrix:
    if format == "q8_0":
        return WeightMatrix(_eight_bits(matrix), format, matrix.columns)
    values = ops.dequantise(pool, matrix)
    if format == "f16":
        return WeightMatrix(values.astype(np.float16).view(np.uint16), format, matrix.columns)
    if format == "bf16":
        bits = values.view(np.uint32)
        to_even = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return WeightMatrix((bits + to_even >> np.uint32(16)).astype(np.uint16), format, matrix.columns)
    return WeightMatrix(values, format, matrix.columns)


def _eight_bits(matrix: WeightMatrix) -> npt.NDArray[np.uint8]:
    """Rows of q8_0 with the integers and scales of a matrix in one of `_INTEGERS`."""
    width = 2 + (_BLOCK // 2 if matrix.format == "q4_0" else 4 * _BLOCK)
    blocks = np.ascontiguousarray(matrix.data).reshape(matrix.rows, -1, width)
    codes = blocks[..., 2:]
    if matrix.format == "q4_0":
        codes = np.concatenate([codes & 0x0F, codes >> 4], axis=-1) - np.uint8(8)
    codes = codes.reshape(matrix.rows, -1, _BLOCK)
    scales = np.repeat(blocks[..., :2], codes.shape[1] // blocks.shape[1], axis=1)
    return np.concatenate([scales, codes], axis=-1).reshape(matrix.rows, -1)
