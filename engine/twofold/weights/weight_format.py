"""Formats of weight matrices, and a matrix as stored in a file.

The formats are those of the native module, one header each (`kernels/include/twofold/formats/`). Reads no file and
packs nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, overload

import numpy as np
import numpy.typing as npt

from twofold._core import weight_formats

PANEL_ROWS: Final = 32
CACHE_LINE: Final = 64
SCALE_GRID: Final = 128
"""fp8: rows and columns per scale."""


@dataclass(frozen=True)
class FormatLayout:
    """One format: its bytes in a file's rows, and packed for the kernels in panels of 32 rows."""

    block_columns: int
    block_bytes: int
    panel_columns: int
    panel_block_bytes: int
    scale_grid: int
    """Rows and columns of weights that share a float32 scale stored outside the rows; 0: no such scales."""
    row_head_bytes: int
    """Bytes before the blocks of a file's row: the scale of formats with one per row or tensor."""
    gguf: str
    """GGUF type; empty: none."""
    quantised: bool
    """Whether `ops.quantise_rows` can produce it."""


FORMATS: Final[Mapping[str, FormatLayout]] = MappingProxyType(
    {name: FormatLayout(*layout) for name, layout in weight_formats().items()}
)
BLOCK_FORMATS: Final = tuple(name for name, layout in FORMATS.items() if layout.block_columns > 1)
_ELEMENTS: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {"f32": np.dtype(np.float32), "f16": np.dtype(np.uint16), "bf16": np.dtype(np.uint16)}
)


def element_type(format: str) -> np.dtype[Any]:
    """Element type of `WeightMatrix.data`: float32 (f32), uint16 (f16 and bf16, as bits), uint8 (the bytes of all
    others)."""
    return _ELEMENTS.get(format, np.dtype(np.uint8))


def source_row_bytes(format: str, columns: int) -> int:
    """Bytes of a row of `columns` weights in a file. Raises ValueError unless it is a whole number of blocks."""
    layout = FORMATS[format]
    if columns % layout.block_columns:
        raise ValueError(
            f"a row of {columns} columns in format {format}; expected a multiple of {layout.block_columns}"
        )
    return layout.row_head_bytes + columns // layout.block_columns * layout.block_bytes


def scale_grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """fp8: shape of the grid of scales of a matrix or a stack of them, one for 128 x 128 weights."""
    return (*shape[:-2], *(-(-size // SCALE_GRID) for size in shape[-2:]))


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a matrix in memory: whole panels of 32 rows, whole panel blocks of columns."""
    layout = FORMATS[format]
    panels = -(-rows // PANEL_ROWS)
    return panels * -(-columns // layout.panel_columns) * layout.panel_block_bytes


ExpertFormats = tuple[str, str, str]
"""Formats of an expert's (gate, up, down)."""


class MixedFormats(tuple[ExpertFormats, ...]):
    """Formats of each of a layer's experts, where they differ."""


LayerFormats = ExpertFormats | MixedFormats
"""Formats of a layer's experts: of all, or of each where they differ."""


def layer_formats(experts: Iterable[ExpertFormats]) -> LayerFormats:
    """Formats of a layer with these experts, at least one."""
    each = MixedFormats(experts)
    return each if len(set(each)) > 1 else each[0]


def formats_by_expert(formats: LayerFormats, num_experts: int) -> tuple[ExpertFormats, ...]:
    """Formats of each of a layer's experts."""
    return formats if isinstance(formats, MixedFormats) else (formats,) * num_experts


def distinct_formats(formats: LayerFormats) -> tuple[ExpertFormats, ...]:
    """Formats that occur among a layer's experts, in order of the first one that has them."""
    return tuple(dict.fromkeys(formats)) if isinstance(formats, MixedFormats) else (formats,)


def packed_expert_bytes(
    formats: ExpertFormats, hidden: int, intermediate: int, *, biases: bool = False
) -> int:
    """Bytes of an expert of (gate, up, down) in memory; biases are float32, each matrix's on a cache line."""
    gate, up, down = formats
    lengths = (intermediate, intermediate, hidden) if biases else ()
    return (
        packed_bytes(gate, intermediate, hidden)
        + packed_bytes(up, intermediate, hidden)
        + packed_bytes(down, hidden, intermediate)
        + sum(-(-4 * length // CACHE_LINE) * CACHE_LINE for length in lengths)
    )


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A matrix as stored in a file, usually a view of the mapped file. Rows may have gaps between them; a row is
    contiguous.

    `data` is [rows, elements of a row], of `element_type(format)`: one for each column, or the row's bytes. `scales` of
    fp8 (a scale grid) are float32 [rows / 128, columns / 128], rounded up; row r has those of scales[r // 128]. Or they
    are [rows, columns / 128], each row's own. mxfp4 may have its exponents there, uint8 [rows, columns / 32]; `data`
    are then [rows, columns / 2], adjacent pairs in one byte.

    Raises ValueError if these are inconsistent.
    """

    data: npt.NDArray[Any]
    format: str
    columns: int
    scales: npt.NDArray[Any] | None = None

    @property
    def has_scales_by_row(self) -> bool:
        """Whether no row shares its scales with another."""
        return self.scales is None or len(self.scales) == self.rows

    @property
    def is_separate(self) -> bool:
        """Whether each row has its own scales, stored outside it."""
        return self.format == "mxfp4" and self.scales is not None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"weight format {self.format!r}; expected one of {', '.join(FORMATS)}")
        element = element_type(self.format)
        width = source_row_bytes(self.format, self.columns) // element.itemsize
        if self.is_separate:
            width = self.columns // 2
        if self.data.dtype != element or self.data.ndim != 2 or self.data.shape[1] != width:
            raise ValueError(
                f"{self.data.dtype} {self.data.shape} for {self.columns} columns in format {self.format}; expected "
                f"{element} (rows, {width})"
            )
        if width > 1 and self.data.strides[1] != element.itemsize:
            raise ValueError("the elements of a row are not adjacent; expected contiguous rows")
        if self.is_separate:
            self._check_exponents()
        elif (self.scales is None) != (FORMATS[self.format].scale_grid == 0):
            raise ValueError(f"format {self.format} with{'out' if self.scales is None else ''} scales")
        elif self.scales is not None:
            grid = scale_grid(self.shape)
            if self.scales.dtype != np.float32 or self.scales.shape not in (grid, (self.rows, grid[1])):
                raise ValueError(
                    f"scales are {self.scales.dtype} {self.scales.shape}; expected float32 {grid}, one for "
                    f"{SCALE_GRID} x {SCALE_GRID} weights, or {self.rows} rows of them"
                )

    def _check_exponents(self) -> None:
        assert self.scales is not None
        expected = (self.rows, self.columns // FORMATS[self.format].block_columns)
        if self.scales.dtype != np.uint8 or self.scales.shape != expected:
            raise ValueError(
                f"scales are {self.scales.dtype} {self.scales.shape}; expected uint8 {expected}, one for "
                f"{FORMATS[self.format].block_columns} weights of a row"
            )

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def source_bytes(self) -> int:
        """Bytes in the file, scales included."""
        return int(self.data.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))

    @property
    def packed_bytes(self) -> int:
        return packed_bytes(self.format, self.rows, self.columns)

    def transposed(self) -> WeightMatrix:
        """A transposed copy. Raises ValueError for a format whose blocks are of one row's columns."""
        if FORMATS[self.format].block_columns > 1:
            raise ValueError(f"format {self.format} has blocks of a row's columns")
        if self.scales is not None and self.has_scales_by_row and self.rows > 1:
            raise ValueError("each row has its own scales")
        scales = None if self.scales is None else np.ascontiguousarray(self.scales.T)
        return WeightMatrix(np.ascontiguousarray(self.data.T), self.format, self.rows, scales)

    def row_range(self, begin: int, end: int) -> WeightMatrix:
        """Rows begin … end-1 as a view. Where that would split a scale of fp8, each row gets its own scales."""
        if self.scales is None or self.has_scales_by_row:
            return self._some(slice(begin, end))
        if begin % SCALE_GRID:
            return self.with_scales_by_row()._some(slice(begin, end))
        scales = self.scales[begin // SCALE_GRID : -(-end // SCALE_GRID)]
        return WeightMatrix(self.data[begin:end], self.format, self.columns, scales)

    def every_other(self, first: int) -> WeightMatrix:
        """Rows first, first + 2, … as a view; rows of fp8 that share scales get their own."""
        return self.with_scales_by_row()._some(slice(first, None, 2))

    def with_scales_by_row(self) -> WeightMatrix:
        """The same values; a grid's scales are repeated for each row."""
        if self.scales is None or self.has_scales_by_row:
            return self
        scales = np.repeat(self.scales, SCALE_GRID, axis=0)[: self.rows]
        return WeightMatrix(self.data, self.format, self.columns, scales)

    def _some(self, rows: slice) -> WeightMatrix:
        scales = None if self.scales is None else self.scales[rows]
        return WeightMatrix(self.data[rows], self.format, self.columns, scales)


Activation = Literal["silu", "swiglu_oai", "gelu_tanh", "silu_of_limited"]
"""Gate activation of a feed-forward (kernels/include/twofold/expert.h)."""

ExpertWeights = tuple[WeightMatrix, WeightMatrix, WeightMatrix]
"""(gate [I, H], up [I, H], down [H, I])."""


class ExpertsOnDemand(Sequence[ExpertWeights]):
    """A layer's experts, each created on request: never all in memory."""

    @abstractmethod
    def expert(self, index: int) -> ExpertWeights:
        """Create the expert, on every call. Raises IndexError for an index past the last one."""

    @overload
    def __getitem__(self, index: int) -> ExpertWeights: ...

    @overload
    def __getitem__(self, index: slice) -> list[ExpertWeights]: ...

    def __getitem__(self, index: int | slice) -> ExpertWeights | list[ExpertWeights]:
        if isinstance(index, slice):
            return [self.expert(each) for each in range(*index.indices(len(self)))]
        return self.expert(index)


@dataclass(frozen=True, eq=False)
class LayerExperts:
    """All experts of a layer."""

    weights: Sequence[ExpertWeights]
    biases: npt.NDArray[np.float32] | None = None
    """Biases [experts, 2 I + H], in the order gate, up, down."""
    refused: Callable[[Exception], Exception] = lambda error: error
    """Converts an error of packing them into the one to raise, which names the tensor."""
