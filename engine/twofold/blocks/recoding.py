"""Conversion of weights to another format than the file's: whole rows at a time, from float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.weights.weight_format import (
    SCALE_GRID,
    ExpertsOnDemand,
    ExpertWeights,
    WeightMatrix,
    element_type,
    source_row_bytes,
)

CHUNK_WEIGHTS: Final = 4 * 1024 * 1024
"""Weights converted to float32 at a time."""


def recoded_rows(
    pool: ops.ThreadPool, where: Path, name: str, matrix: WeightMatrix, format: str
) -> Iterator[bytes]:
    """Yield the bytes of `matrix` in `format`, some rows at a time; tensor `name` of the model at `where`.

    Raises ModelLoadError for a weight that is not finite.
    """
    step = max(1, CHUNK_WEIGHTS // matrix.columns // SCALE_GRID) * SCALE_GRID
    for begin in range(0, matrix.rows, step):
        part = matrix.row_range(begin, min(matrix.rows, begin + step))
        if part.format == format and not part.is_separate:
            yield np.ascontiguousarray(part.data).tobytes()
            continue
        values = ops.dequantise(pool, part)
        if not np.isfinite(values).all():
            raise ModelLoadError(
                f"{where}: tensor {name} holds a weight that is not finite; the checkpoint is damaged, download "
                "it again"
            )
        yield ops.quantise_rows(pool, np.ascontiguousarray(values), format).tobytes()


@dataclass(frozen=True)
class Recoding:
    """A format that weights are converted to on reading, regardless of the file's."""

    format: str
    pool: ops.ThreadPool | None
    """Thread pool for conversion; None: only headers are read."""

    def matrix(self, where: Path, name: str, matrix: WeightMatrix) -> WeightMatrix:
        """`matrix` in that format: a copy in memory, or `matrix` itself if it has the format. Raises ModelLoadError."""
        if matrix.format == self.format and not matrix.is_separate:
            return matrix
        assert self.pool is not None, "weights are read, so there is a pool"
        element = element_type(self.format)
        rows = b"".join(recoded_rows(self.pool, where, name, matrix, self.format))
        width = source_row_bytes(self.format, matrix.columns) // element.itemsize
        return WeightMatrix(
            np.frombuffer(rows, element).reshape(matrix.rows, width), self.format, matrix.columns
        )


class RecodedExperts(ExpertsOnDemand):
    """Experts in another format, converted on every request."""

    def __init__(self, experts: Sequence[ExpertWeights], recoding: Recoding, where: Path, name: str) -> None:
        self._experts, self._recoding, self._where, self._name = experts, recoding, where, name

    def __len__(self) -> int:
        return len(self._experts)

    def expert(self, index: int) -> ExpertWeights:
        gate, up, down = (
            self._recoding.matrix(self._where, self._name, matrix) for matrix in self._experts[index]
        )
        return gate, up, down
