"""Which rows of the checkpoint's matrices each dense tensor on a device has, for adapters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from twofold.blocks.device_step import I64

_WEIGHT: Final = ".weight"


class Part(NamedTuple):
    """A matrix of the checkpoint in a device's tensor, which has its rows from `first_row` on."""

    name: str
    """Checkpoint name, without `.weight`."""
    first_row: int
    """In the tensor."""
    rows: I64
    """Row of the matrix at each of the part's rows of the tensor."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How a tensor was made of matrices."""

    parts: tuple[Part, ...]
    columns: I64 | None = None
    """Column of the matrices at each of the tensor's; None: the same."""
    num_heads: int = 0
    """Above 0: the tensor is [heads, ., .], each head with the same number of the only part's rows."""
    is_transposed: bool = False
    """Whether a head lies as [columns, rows], so that its products have the matrix's rows; else its columns."""
    home: int = 0
    """Number of its device."""

    def reordered(self, rows: I64 | None, columns: I64 | None) -> Layout:
        """The layout with rows and columns in this order, where rows of a part stay together."""
        layout = self if columns is None else replace(self, columns=columns)
        if rows is None:
            return layout
        parts = []
        for name, first, own in self.parts:
            (places,) = np.nonzero((rows >= first) & (rows < first + len(own)))
            assert len(places) == len(own) == places[-1] - places[0] + 1, f"rows of {name} are apart"
            parts.append(Part(name, int(places[0]), own[rows[places] - first]))
        return replace(layout, parts=tuple(sorted(parts, key=lambda part: part.first_row)))


@dataclass
class DeviceMatrices:
    """The layouts of a model's dense tensors. Tensors that nothing else holds are forgotten."""

    _layouts: dict[int, tuple[weakref.ref[Tensor], Layout]] = field(default_factory=dict)
    """By the tensor's id."""

    def add(self, tensor: Tensor, matrices: Sequence[tuple[str, int]], home: int = 0) -> None:
        """Note that a tensor is these matrices (name, rows), one below the other. home: number of its device."""
        parts, first = [], 0
        for name, num_rows in matrices:
            parts.append(Part(name.removesuffix(_WEIGHT), first, np.arange(num_rows)))
            first += num_rows
        self._keep(tensor, Layout(tuple(parts), home=home))

    def derive(self, tensor: Tensor, source: Tensor, *, rows: I64 | None, columns: I64 | None) -> None:
        """Note that a tensor is `source` with its rows or columns in another order."""
        self._keep(tensor, self._of(source).reordered(rows, columns))

    def divide(self, tensor: Tensor, source: Tensor, rows: I64, *, is_transposed: bool) -> None:
        """Note that a tensor has `rows` [heads, rows of a head] of the only matrix of `source`."""
        of_source = self._of(source)
        (whole,) = of_source.parts
        part = Part(whole.name, 0, rows.reshape(-1))
        self._keep(
            tensor,
            Layout((part,), num_heads=len(rows), is_transposed=is_transposed, home=of_source.home),
        )

    def items(self) -> Iterator[tuple[Tensor, Layout]]:
        """Tensors that are still held, with their layouts."""
        for kept, layout in self._layouts.values():
            if (tensor := kept()) is not None:
                yield tensor, layout

    def _keep(self, tensor: Tensor, layout: Layout) -> None:
        self._layouts[id(tensor)] = weakref.ref(tensor), layout

    def _of(self, tensor: Tensor) -> Layout:
        kept, layout = self._layouts[id(tensor)]
        assert kept() is tensor, "a tensor that is not a matrix of the checkpoint"
        return layout
