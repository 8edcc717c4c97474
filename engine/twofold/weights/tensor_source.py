"""Tensors of a model on disk, for any file format: their locations, and checked views of the mapped files.

A reader of one file format (`checkpoint.py`: safetensors) parses headers into `TensorEntry`s and makes a `TensorSource`
of them. Names are those of a Hugging Face checkpoint; readers of other formats translate. A tensor's bytes are read on
first access.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.api.errors import ModelLoadError
from twofold.weights.read_ahead import ReadAhead
from twofold.weights.weight_format import FORMATS, WeightMatrix, element_type, scale_grid, source_row_bytes

F32 = npt.NDArray[np.float32]

_FLOATS: Final = ("f32", "f16", "bf16")
_COMPARED_BYTES: Final = 1024 * 1024
"""Bytes of two tensors compared at a time."""
_SMALL_SHARE: Final = 0.25
"""Share of the machine's memory; files of smaller models stay in the page cache after reading."""


def scales_name(tensor: str) -> str:
    """fp8: name of a tensor's grid of scales; values are multiplied by it, whatever its name suggests."""
    return f"{tensor}_scale_inv"


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and location of one tensor."""

    name: str
    file: Path
    dtype: str
    """Element type as named in the file, e.g. "BF16"."""
    shape: tuple[int, ...]
    """Rows first; a stack of matrices is (matrices, rows, columns)."""
    offset: int
    """Offset of the first byte from the start of the file."""
    num_bytes: int
    format: str | None
    """One of `weight_format.FORMATS`; None for an unsupported type."""
    scales: str | None = None
    """Name of the exponents' tensor, for mxfp4 with separate exponents."""
    recoded_bytes: int | None = None
    """Bytes in `format` if reading re-encodes the file's data (`num_bytes` are the file's)."""

    def check(self, shape: tuple[int, ...]) -> str:
        """Return the format. Raises ModelLoadError unless it is supported and the shape is `shape`."""
        if self.format is None:
            raise ModelLoadError(
                f"{self.file}: tensor {self.name} has dtype {self.dtype}, expected one of the formats "
                f"{', '.join(FORMATS)}; use another checkpoint of this model"
            )
        if self.shape != shape and (len(shape) > 1 or self.shape != (1, *shape)):  # a vector may be a row
            raise ModelLoadError(
                f"{self.file}: tensor {self.name} has shape {list(self.shape)}, expected {list(shape)} from the "
                "model's configuration; configuration and weights belong to different models, download both again"
            )
        if len(shape) == 1 and self.format not in _FLOATS:
            raise ModelLoadError(
                f"{self.file}: tensor {self.name} is {self.dtype}, expected floats for a vector; download it again"
            )
        try:
            row_bytes = source_row_bytes(self.format, shape[-1])
            if self.scales is not None:
                row_bytes = shape[-1] // 2
            whole = math.prod(shape[:-1]) * row_bytes
        except ValueError as error:
            raise ModelLoadError(f"{self.file}: tensor {self.name} is {error}; download it again") from None
        if (self.num_bytes if self.recoded_bytes is None else self.recoded_bytes) != whole:
            raise ModelLoadError(
                f"{self.file}: tensor {self.name} has {self.num_bytes} bytes, expected {whole}; download it again"
            )
        return self.format


def widened(elements: npt.NDArray[Any], format: str | None) -> F32:
    """Elements of a tensor of plain floats in float32, a copy."""
    if format == "bf16":
        of_bf16: F32 = (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return of_bf16
    return (elements.view(np.float16) if format == "f16" else elements).astype(np.float32)


def _check_exponents(entry: TensorEntry, exponents: TensorEntry) -> None:
    expected = (*entry.shape[:-1], entry.shape[-1] // FORMATS[entry.format or ""].block_columns)
    if exponents.dtype not in ("U8", "F8_E8M0") or exponents.shape != expected:
        raise ModelLoadError(
            f"{exponents.file}: scales {exponents.name} are {exponents.dtype} {list(exponents.shape)}, expected U8 "
            f"{list(expected)} for {entry.name}; download it again"
        )


class TensorSource:
    """All tensors of a model by name. Views keep their file mapped as long as they live."""

    def __init__(self, where: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.where = where
        """Directory or file named in errors."""
        self._entries = entries
        self._maps: dict[Path, _core.FileMapping] = {}
        self._read_ahead = ReadAhead()
        self._wanted: set[str] = set()
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._is_small = sum(entry.num_bytes for entry in entries.values()) < _SMALL_SHARE * memory_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Location of tensor `name`. Raises ModelLoadError if the model does not have it."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelLoadError(
                f"{self.where}: tensor {name} is missing from the checkpoint's {len(self)} tensors; the download "
                "is incomplete or config.json belongs to another model"
            )
        return entry

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Shape of tensor `name`; None if the model does not have it."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """The format of tensor `name`; reads no data. Raises ModelLoadError unless it (and its scales) can be used."""
        entry = self.entry(name)
        format = entry.check(shape)
        if entry.scales is not None:
            _check_exponents(entry, self.entry(entry.scales))
        if format == "fp8":
            scales = self.entry(scales_name(name))
            by_row = (*shape[:-1], scale_grid(shape)[-1])
            scales.check(by_row if scales.shape == by_row else scale_grid(shape))
            if scales.format not in _FLOATS:
                raise ModelLoadError(
                    f"{scales.file}: scales {scales.name} are {scales.dtype}, expected floats; download it again"
                )
        return format

    def companions(self, name: str) -> tuple[str, ...]:
        """Names of the tensors read together with `name`: the scales of fp8, and of mxfp4 if separate."""
        scales = self.entry(name).scales
        if scales is not None:
            return (scales,)
        return (scales_name(name),) if self.entry(name).format == "fp8" else ()

    def is_same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes. Reads both, up to the first difference."""
        entries = self.entry(name), self.entry(other)
        one, two = ((entry.dtype, entry.shape, entry.num_bytes) for entry in entries)
        if one != two:
            return False
        first, second = (self._bytes(entry) for entry in entries)
        steps = range(0, len(first), _COMPARED_BYTES)
        return all(
            np.array_equal(first[at : at + _COMPARED_BYTES], second[at : at + _COMPARED_BYTES])
            for at in steps
        )

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightMatrix:
        """Tensor `name` as a read-only view of the mapped file. Raises ModelLoadError as `check`."""
        return self.stack(name, shape)[0]

    def stack(self, name: str, shape: tuple[int, ...]) -> list[WeightMatrix]:
        """The matrices of a tensor of (matrices, rows, columns), each like the result of `matrix`."""
        format = self.check(name, shape)
        *stacked, rows, columns = shape
        count = math.prod(stacked)
        entry = self.entry(name)
        data = self._elements(entry, format).reshape(count, rows, -1)
        if entry.scales is not None:
            exponents = self._elements(self.entry(entry.scales), format).reshape(count, rows, -1)
            return [WeightMatrix(data[index], format, columns, exponents[index]) for index in range(count)]
        if format != "fp8":
            return [WeightMatrix(data[index], format, columns) for index in range(count)]
        scales = self._entries[scales_name(name)]
        grid = self._floats(scales).reshape(count, *scales.shape[-2:])
        return [WeightMatrix(data[index], format, columns, grid[index]) for index in range(count)]

    def vector(self, name: str, shape: tuple[int, ...]) -> F32:
        """Tensor `name`, plain floats of any shape, as an exact float32 copy. Raises ModelLoadError."""
        if self.check(name, shape) not in _FLOATS:
            entry = self.entry(name)
            raise ModelLoadError(
                f"{entry.file}: tensor {name} is {entry.dtype}, expected floats; use another checkpoint of this model"
            )
        values = self._floats(self.entry(name)).reshape(shape)
        if not np.isfinite(values).all():
            raise ModelLoadError(
                f"{self.entry(name).file}: tensor {name} holds a NaN or an infinity, expected finite weights; the file "
                "is damaged, download it again"
            )
        return values

    @property
    def mappings(self) -> Iterable[_core.FileMapping]:
        """Files that are mapped now."""
        return self._maps.values()

    def will_read(self, names: Iterable[str]) -> None:
        """Start reading these tensors from disk, after those requested before; once, until they are released."""
        wanted = [name for name in names if name not in self._wanted]
        self._wanted.update(wanted)
        for stretch in self._page_ranges(wanted):
            self._read_ahead.request(*stretch)

    def release_pages(self, names: Iterable[str]) -> None:
        """Release these tensors' pages from memory; a later access to a view reads them again.

        For weights that have been packed elsewhere: otherwise a large model is in memory twice, once as its files. The
        files of a model that is small relative to the memory stay in the page cache, for the next start.
        """
        names = list(names)
        self._wanted.difference_update(names)
        for file, begin, end in self._page_ranges(names):
            self._mapped(file).release(begin, end - begin)
        if self._is_small:
            return
        for file, begin, end in self._page_ranges(names):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def _page_ranges(self, names: Iterable[str]) -> Iterator[tuple[Path, int, int]]:
        """(file, first byte, end) of the whole pages of these tensors, adjacent ranges joined."""
        spans = sorted(
            (str(entry.file), entry.offset, entry.offset + entry.num_bytes)
            for entry in map(self.entry, names)
            if entry.num_bytes
        )
        joined: list[tuple[str, int, int]] = []
        for file, begin, end in spans:
            begin -= begin % mmap.PAGESIZE
            if joined and joined[-1][0] == file and begin <= joined[-1][2] + mmap.PAGESIZE:
                begin, end = joined[-1][1], max(end, joined.pop()[2])
            joined.append((file, begin, end))
        return ((Path(file), begin, end) for file, begin, end in joined)

    def _bytes(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """A tensor's bytes in the mapped file."""
        whole = np.frombuffer(memoryview(self._mapped(entry.file)), np.uint8)
        return whole[entry.offset : entry.offset + entry.num_bytes]

    def _elements(self, entry: TensorEntry, format: str) -> npt.NDArray[Any]:
        """A tensor as float32, uint16 or bytes: a view of the map (a copy if it is not aligned to its elements)."""
        raw = self._bytes(entry)
        element = element_type(format)
        aligned = raw if raw.ctypes.data % element.itemsize == 0 else raw.copy()
        elements: npt.NDArray[Any] = aligned.view(element)
        return elements

    def _floats(self, entry: TensorEntry) -> F32:
        """A float32 copy of a tensor of plain floats."""
        return widened(self._elements(entry, entry.format or ""), entry.format).reshape(entry.shape)

    def _mapped(self, file: Path) -> _core.FileMapping:
        mapped = self._maps.get(file)
        if mapped is None:
            try:
                mapped = _core.FileMapping(os.fsencode(file))
            except OSError as error:
                raise ModelLoadError(
                    f"{file}: cannot be memory-mapped: {error.strerror}; expected a file of weights on a file system "
                    "that maps files"
                ) from None
            self._maps[file] = mapped
        return mapped
