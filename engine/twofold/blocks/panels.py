"""Source of a model's packed matrices: packed during loading, or mapped from a file of panels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from twofold import _core
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.weights.panel_file import Contents, read_contents
from twofold.weights.weight_format import WeightMatrix

Matrices = Callable[[], Sequence[WeightMatrix]]


class Panels(Protocol):
    def matrix(
        self, pool: ops.ThreadPool, name: str, matrices: Matrices, *, by_head: bool = False
    ) -> ops.PackedMatrix:
        """`matrices()` stacked row-wise, in panels. `name` is the stack's, the same in every run.

        by_head: each part multiplies rows of its own.

        Raises KernelError for weights that cannot be packed.
        """


class _PackedWhenLoaded:
    def matrix(
        self, pool: ops.ThreadPool, name: str, matrices: Matrices, *, by_head: bool = False
    ) -> ops.PackedMatrix:
        return ops.PackedMatrix(pool, matrices())


PACKED_WHEN_LOADED: Final[Panels] = _PackedWhenLoaded()


class CutPanels:
    """Packs this rank's share of each matrix that is worth a message. Rank 0 holds the others.

    Every rank asks for the same matrices in the same order, so a matrix is known by its number.
    """

    def __init__(self, ranks: _core.Ranks, min_bytes: int) -> None:
        """min_bytes: size of the smallest matrix that is cut."""
        self.ranks = ranks
        self._min_bytes = min_bytes
        self.matrices: list[ops.PackedMatrix] = []
        """The cut matrices, by number."""
        self.num_bytes = 0
        """Bytes of all matrices in this process."""

    def matrix(
        self, pool: ops.ThreadPool, name: str, matrices: Matrices, *, by_head: bool = False
    ) -> ops.PackedMatrix:
        """See `Panels.matrix`."""
        parts = matrices()
        if self.is_cut(parts, by_head=by_head):
            made = ops.PackedMatrix(pool, parts, self.ranks, len(self.matrices))
            self.matrices.append(made)
        else:
            made = ops.PackedMatrix(pool, parts, self.ranks)
        self.num_bytes += made.bytes
        return made

    def is_cut(self, parts: Sequence[WeightMatrix], *, by_head: bool) -> bool:
        """Whether a stack is shared among the ranks; else rank 0 holds it alone."""
        packed_bytes = sum(part.packed_bytes for part in parts)
        num_panels = max(-(-part.rows // _core.panel_rows()) for part in parts)
        return not by_head and packed_bytes >= self._min_bytes and num_panels >= self.ranks.size


class MappedPanels:
    """A memory-mapped file of panels, shared with other processes that map it."""

    def __init__(self, path: Path, contents: Contents | None = None) -> None:
        """Validate the file's header and map it. Raises ModelLoadError."""
        self.path = path
        self.contents = read_contents(path) if contents is None else contents
        layout = _core.panel_layout()
        if self.contents.layout != layout:
            raise ModelLoadError(
                f"{path}: holds panels of layout {self.contents.layout}, this build reads {layout}; pack the model "
                "again with `twofold pack MODEL OUT`"
            )
        try:
            self.mapping = _core.FileMapping(os.fsencode(path))
        except OSError as error:
            raise ModelLoadError(
                f"{path}: cannot be memory-mapped: {error.strerror}; check the file system"
            ) from None

    def matrix(
        self, pool: ops.ThreadPool, name: str, matrices: Matrices, *, by_head: bool = False
    ) -> ops.PackedMatrix:
        """See `Panels.matrix`; `matrices` is not called. Raises ModelLoadError if the file has no such stack."""
        stored = self.contents.matrices.get(name)
        if stored is None:
            raise ModelLoadError(
                f"{self.path}: has no panels of {name}; it was packed from another model, pack this one again"
            )
        return ops.PackedMatrix.from_file(
            pool, stored.parts, stored.columns, self.mapping, stored.stretch.offset
        )

    def experts(
        self, activation: str = "silu", num_layers: int | None = None, limits: Sequence[float] = ()
    ) -> _core.ExpertStore:
        """Experts of the first `num_layers` (None: all), in the file's pages, with this activation and its limits."""
        stored = self.contents.experts
        return _core.ExpertStore.from_file(
            stored.num_experts,
            stored.hidden,
            stored.intermediate,
            stored.formats[:num_layers],
            self.mapping,
            stored.stretches[0].offset if stored.stretches else 0,
            activation,
            stored.biases,
            limits,
            stored.second_half,
        )
