"""How a block reads its tensors from an opened checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twofold._core import pack_panels
from twofold.api.errors import KernelError, ModelLoadError
from twofold.blocks import ops
from twofold.blocks.panels import PACKED_WHEN_LOADED, MappedPanels, Matrices, Panels
from twofold.blocks.recoding import Recoding
from twofold.weights.tensor_source import TensorSource
from twofold.weights.tensor_spec import TensorSpec
from twofold.weights.weight_format import WeightMatrix, packed_bytes

F32 = npt.NDArray[np.float32]


class Stacked(NamedTuple):
    """Rows of a tensor in a packed matrix."""

    matrix: ops.PackedMatrix
    first_row: int
    """In the matrix."""
    rows: range
    """The tensor's rows."""
    transposed: bool = False
    """Whether these rows are columns of the matrix."""


class BlockWeights:
    """A block's tensors in an opened checkpoint, keyed by their role in the block ("q", "norm").

    Matrices are views of the mapped files; vectors are float32 copies. Methods other than `check` raise ModelLoadError
    only if the files changed after `check`.
    """

    def __init__(
        self,
        source: TensorSource,
        specs: Mapping[str, TensorSpec],
        panels: Panels = PACKED_WHEN_LOADED,
        recoding: Recoding | None = None,
    ) -> None:
        self.source = source
        self.specs = specs
        self._panels = panels
        self.recoding = recoding
        """Format conversion of all tensors that need not be exact; None: the files' formats."""
        self.stacked: dict[str, list[Stacked]] = {}
        """Where the rows of each part's tensor lie, of the matrices packed so far."""

    def from_panels(self, panels: Panels) -> BlockWeights:
        """The same tensors, packed by or mapped from `panels`."""
        return BlockWeights(self.source, self.specs, panels, self.recoding)

    def recoded(self, recoding: Recoding | None) -> BlockWeights:
        """The same tensors, converted to another format as they are read."""
        return BlockWeights(self.source, self.specs, self._panels, recoding)

    def having(self, specs: Mapping[str, TensorSpec]) -> BlockWeights:
        """Other tensors, or these by other roles, read in the same way."""
        return BlockWeights(self.source, specs, self._panels, self.recoding)

    def __contains__(self, part: str) -> bool:
        return part in self.specs

    @property
    def is_mapped(self) -> bool:
        """Whether packed matrices come from a file of panels instead of `source`."""
        return isinstance(self._panels, MappedPanels)

    @property
    def names(self) -> list[str]:
        """Checkpoint names of the tensors and of their companions (scales)."""
        return [
            name for spec in self.specs.values() for name in (spec.name, *self.source.companions(spec.name))
        ]

    @property
    def source_bytes(self) -> int:
        """Size in the files, bytes."""
        return sum(self.source.entry(name).num_bytes for name in self.names)

    def check(self) -> None:
        """Raises ModelLoadError for a tensor that is missing or has the wrong dtype or shape; reads headers only."""
        for part in self.specs:
            self.format(part)

    def format(self, part: str) -> str:
        """Format of `part` in memory."""
        spec = self.specs[part]
        found = self.source.check(spec.name, spec.shape)
        return found if self.recoding is None or spec.role == "exact" else self.recoding.format

    def matrix(self, part: str) -> WeightMatrix:
        spec = self.specs[part]
        found = self.source.matrix(spec.name, (spec.shape[0], spec.shape[1]))
        if self.recoding is None or spec.role == "exact":
            return found
        return self.recoding.matrix(self.source.where, spec.name, found)

    def as_stored(self, part: str) -> WeightMatrix:
        """A matrix in the file's format, whatever other tensors are converted to: its rows are read when needed."""
        spec = self.specs[part]
        return self.source.matrix(spec.name, (spec.shape[0], spec.shape[1]))

    def stack(self, part: str) -> list[WeightMatrix]:
        """Matrices of a stacked tensor, as the files have them."""
        spec = self.specs[part]
        return self.source.stack(spec.name, spec.shape)

    def vector(self, part: str) -> F32:
        spec = self.specs[part]
        values = self.source.vector(spec.name, spec.shape)
        return values + np.float32(1.0) if spec.zero_centred else values

    def optional_vector(self, part: str) -> F32 | None:
        return self.vector(part) if part in self.specs else None

    def packed(self, pool: ops.ThreadPool, where: str, *parts: str) -> ops.PackedMatrix:
        """The matrices stacked row-wise and packed for the CPU; `where` begins the message of a ModelLoadError."""
        name = " + ".join(self.specs[part].name for part in parts)
        rows = [(part, range(self.specs[part].shape[0])) for part in parts]
        return self.pack(pool, where, name, lambda: [self.matrix(part) for part in parts], rows=rows)

    def pack(
        self,
        pool: ops.ThreadPool,
        where: str,
        name: str,
        matrices: Matrices,
        *,
        by_head: bool = False,
        rows: Sequence[tuple[str, range]] = (),
        transposed: bool = False,
    ) -> ops.PackedMatrix:
        """Like `packed`, for matrices computed from tensors; `name` is their name in a file of panels.

        by_head: see `Panels.matrix`. rows: of each matrix, the part and the rows of its tensor that it has, for
        adapters. transposed: whether it has them as columns.
        """
        try:
            made = self._panels.matrix(pool, name, matrices, by_head=by_head)
        except KernelError as error:
            raise self.refused(error, where) from None
        first = 0
        for part, own in rows:
            self.stacked.setdefault(part, []).append(Stacked(made, first, own, transposed))
            first += self.specs[part].shape[1] if transposed else len(own)
        return made

    def checked(self, pool: ops.ThreadPool, part: str) -> WeightMatrix:
        """A matrix used without packing. Raises ModelLoadError for a NaN or an infinity."""
        matrix = self.matrix(part)
        try:
            ops.expect_finite(pool, matrix)
        except KernelError as error:
            raise self.refused(error) from None
        return matrix

    def refused(self, error: Exception, where: str = "experts") -> ModelLoadError:
        """The ModelLoadError for weights that native code rejected with `error`. Reads all matrices to name the
        tensor."""
        for spec in self.specs.values():
            if len(spec.shape) == 1:
                continue
            for index, matrix in enumerate(self.source.stack(spec.name, spec.shape)):
                try:
                    pack_panels(matrix)
                except ValueError as found:
                    entry = self.source.entry(spec.name)
                    number = f", matrix {index}" if len(spec.shape) > 2 else ""
                    return ModelLoadError(
                        f"{entry.file}: tensor {spec.name}{number}: {found}; the file is damaged, download it again"
                    )
        return ModelLoadError(f"{where}: {error}; the weights are damaged, download them again")

    def packed_bytes(self, part: str) -> int:
        """Bytes of the packed panels of a matrix or a stack; of a vector, its float32 bytes."""
        spec = self.specs[part]
        if len(spec.shape) == 1:
            return 4 * spec.shape[0]
        *stacked, rows, columns = spec.shape
        return math.prod(stacked) * packed_bytes(self.format(part), rows, columns)
