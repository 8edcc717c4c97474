"""File of packed panels (`twofold pack`): its table of contents, and its tensors as a `TensorSource`.

Layout: 32 bytes of magic, version and position of the contents; panels of dense matrices, each page-aligned; all
experts, layer after layer, aligned to 2 MiB, the large page size; rows of the dense tensors; and at the end the
contents, a JSON object. Everything is little-endian. Panels have their in-memory layout, so a mapped file is used
without conversion. Files are untrusted: every offset, length and count is checked before it is used. The weights' bytes
are compared with their checksums if the file's modification time has changed (`check_if_changed`) and on request
(`check_stretches`), because that reads the whole file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import open_regular
from twofold.weights.tensor_source import TensorEntry, TensorSource
from twofold.weights.weight_format import (
    CACHE_LINE,
    FORMATS,
    LayerFormats,
    MixedFormats,
    formats_by_expert,
    layer_formats,
    packed_bytes,
    packed_expert_bytes,
    source_row_bytes,
)

_log = logging.getLogger(__name__)
PANEL_FILE: Final = "model.panels"
"""File name in a packed model's directory."""
SUFFIX: Final = ".panels"
MAGIC: Final = b"2FPANELS"
VERSIONS: Final = (1, 2)
"""Versions that are read. 2: experts of a layer differ in their formats."""
PREFIX: Final = struct.Struct("<8sIIQQ")
"""Magic, version, CRC-32 of the contents, their offset and length."""
MAX_CONTENTS_BYTES: Final = 64 * 1024 * 1024
PAGE: Final = 4096
LARGE_PAGE: Final = 2 * 1024 * 1024
_PIECE_BYTES: Final = 2 * 1024 * 1024
_REMEDY: Final = "pack the model again with `twofold pack MODEL OUT`"


@dataclass(frozen=True)
class Stretch:
    """A byte range of the file."""

    offset: int
    num_bytes: int
    crc32: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class StoredMatrix:
    """Panels of matrices that are stacked by rows."""

    parts: tuple[tuple[str, int], ...]
    """(format, rows) of each matrix."""
    columns: int
    stretch: Stretch


@dataclass(frozen=True)
class StoredExperts:
    """All experts; the layers follow one another without gaps."""

    num_experts: int
    hidden: int
    intermediate: int
    formats: tuple[LayerFormats, ...]
    """Formats of each layer's experts."""
    stretches: tuple[Stretch, ...]
    biases: bool = False
    """Whether each expert's biases follow its panels."""
    second_half: int = 0
    """Intermediate size of the second half of a layer's experts; 0: as the first half's."""

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Distinct sizes, each of as many adjacent experts."""
        return (self.intermediate, self.second_half) if self.second_half else (self.intermediate,)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer's experts; each begins on a cache line."""
        inner, of_size = self.intermediate_sizes, self.num_experts // len(self.intermediate_sizes)
        sizes = (
            packed_expert_bytes(formats, self.hidden, inner[n // of_size], biases=self.biases)
            for n, formats in enumerate(formats_by_expert(self.formats[layer], self.num_experts))
        )
        return sum(-(-size // CACHE_LINE) * CACHE_LINE for size in sizes)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model: its rows as in a checkpoint, or only a record that it is among the panels."""

    format: str
    shape: tuple[int, ...]
    stretch: Stretch | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * source_row_bytes(self.format, self.shape[-1])


@dataclass(frozen=True)
class Contents:
    """Table of contents of a file of panels."""

    layout: str
    """Panel layout: `_core.panel_layout()` of the program that wrote it."""
    fingerprint: str
    """Fingerprint of the source model."""
    source: str
    """Name of the source model, for display."""
    matrices: Mapping[str, StoredMatrix]
    experts: StoredExperts
    tensors: Mapping[str, StoredTensor]
    """Tensors; empty in a file that accompanies its model (`--packed-cache`)."""
    written_s: int = 0
    """Unix time that the file's modification time is set to: while they are equal, the file is unchanged. 0:
    unknown."""

    @property
    def version(self) -> int:
        """Version of a file with these contents, the first one that has them."""
        is_mixed = any(isinstance(formats, MixedFormats) for formats in self.experts.formats)
        return VERSIONS[1 if is_mixed else 0]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def stretches(self) -> Iterator[tuple[str, Stretch]]:
        """All byte ranges, with a description of their content."""
        for name, matrix in self.matrices.items():
            yield name, matrix.stretch
        for layer, stretch in enumerate(self.experts.stretches):
            yield f"experts of layer {layer}", stretch
        for name, tensor in self.tensors.items():
            if tensor.stretch is not None:
                yield f"{name} (rows)", tensor.stretch

    @property
    def panels_end(self) -> int:
        """End of the panels, which steps read; rows of tensors follow."""
        experts = (stretch.end for stretch in self.experts.stretches[-1:])
        return max(*experts, *(matrix.stretch.end for matrix in self.matrices.values()))


def read_contents(path: Path) -> Contents:
    """Read and check the contents of `path`; nothing else is read. Raises ModelLoadError."""
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(PREFIX.size)
            if prefix[: len(MAGIC)] != MAGIC or len(prefix) < PREFIX.size:
                _refuse(path, f"begins with {prefix[:8]!r}, expected {MAGIC!r}: not a file of packed panels")
            _, version, crc32, offset, num_bytes = PREFIX.unpack(prefix)
            if version not in VERSIONS:
                _refuse(
                    path,
                    f"is of version {version}, expected {VERSIONS[-1]} at most: another Twofold wrote it",
                )
            if num_bytes > MAX_CONTENTS_BYTES:
                _refuse(
                    path, f"says its contents are {num_bytes} bytes, expected {MAX_CONTENTS_BYTES} at most"
                )
            if offset + num_bytes != size:
                _refuse(path, f"has {size} bytes, expected {offset + num_bytes}: it is truncated or damaged")
            stream.seek(offset)
            text = stream.read(num_bytes)
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: missing; {_REMEDY}") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}; check the disk") from None
    if zlib.crc32(text) != crc32:
        _refuse(path, f"lists contents of CRC {zlib.crc32(text):08x}, expected {crc32:08x}: it was changed")
    try:
        return _parse(json.loads(text), offset)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        _refuse(path, f"lists contents that cannot be ({type(error).__name__}: {error})")


def _refuse(path: Path, what: str) -> NoReturn:
    raise ModelLoadError(f"{path}: {what}; {_REMEDY}")


def _parse(data: Any, end: int) -> Contents:
    """Parse the contents. Raises ValueError and similar if they do not fit a file whose data end at `end`."""
    return Contents(
        layout=_text(data["layout"]),
        fingerprint=_text(data["fingerprint"]),
        source=_text(data["source"]),
        matrices={name: _matrix(each, end) for name, each in data["matrices"].items()},
        experts=_experts(data["experts"], end),
        tensors={name: _tensor(each, end) for name, each in data["tensors"].items()},
        written_s=_count(data.get("written_s", 0) + 1) - 1,
    )


def _matrix(data: Any, end: int) -> StoredMatrix:
    parts = tuple((_format(format), _count(rows)) for format, rows in data["parts"])
    columns = _count(data["columns"])
    matrix = StoredMatrix(parts, columns, _stretch(data["stretch"], end, PAGE))
    _expect(matrix.stretch.num_bytes, sum(packed_bytes(format, rows, columns) for format, rows in parts))
    return matrix


def _experts(data: Any, end: int) -> StoredExperts:
    formats = tuple(map(_layer_formats, data["formats"]))
    stretches = tuple(_stretch(each, end, CACHE_LINE) for each in data["stretches"])
    num_experts, hidden, inner = (_count(data[name]) for name in ("num_experts", "hidden", "intermediate"))
    biases = data.get("biases", False)
    if not isinstance(biases, bool):
        raise ValueError(f"{biases!r} does not say whether experts have biases")
    second = _count(data["second_half"]) if data.get("second_half") else 0
    for each in formats:
        _expect(len(formats_by_expert(each, num_experts)), num_experts)
    if second and num_experts % 2:
        raise ValueError(f"{num_experts} experts have no second half")
    experts = StoredExperts(num_experts, hidden, inner, formats, stretches, biases, second)
    _expect(len(stretches), len(formats))
    at = stretches[0].offset if stretches else 0
    for layer, stretch in enumerate(stretches):
        _expect(stretch.offset, at)
        _expect(stretch.num_bytes, experts.layer_bytes(layer))
        at = stretch.end
    return experts


def _layer_formats(data: Any) -> LayerFormats:
    if isinstance(data[0], str):
        gate, up, down = map(_format, data)
        return gate, up, down
    return layer_formats((_format(gate), _format(up), _format(down)) for gate, up, down in data)


def _tensor(data: Any, end: int) -> StoredTensor:
    shape = tuple(_count(size) for size in data["shape"])
    stretch = None if data["stretch"] is None else _stretch(data["stretch"], end, CACHE_LINE)
    tensor = StoredTensor(_format(data["format"]), shape, stretch)
    _expect(tensor.num_bytes if stretch is None else stretch.num_bytes, tensor.num_bytes)
    return tensor


def _stretch(data: Any, end: int, alignment: int) -> Stretch:
    stretch = Stretch(_count(data["offset"]), _count(data["num_bytes"]), _count(data["crc32"] + 1) - 1)
    if stretch.offset < PREFIX.size or stretch.offset % alignment or stretch.end > end:
        raise ValueError(f"bytes {stretch.offset} to {stretch.end} of {end}")
    return stretch


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**48:
        raise ValueError(f"{value!r} is no size")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _format(value: Any) -> str:
    if value not in FORMATS:
        raise ValueError(f"{value!r} is no weight format")
    return str(value)


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{found}, expected {expected}")


def check_if_changed(path: Path, contents: Contents) -> None:
    """Verify the checksums of all bytes, unless the modification time is the recorded one.

    An intact file gets that time back, so that the next start reads nothing. Raises ModelLoadError.
    """
    written_ns = contents.written_s * 10**9
    try:
        if written_ns and path.stat().st_mtime_ns == written_ns:
            return
        _log.info("%s: copied or changed since it was packed; comparing it with its checksums", path)
        check_stretches(path, contents)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}; check the disk") from None
    try:
        if written_ns:
            os.utime(path, ns=(path.stat().st_atime_ns, written_ns))
    except OSError as error:
        _log.warning(
            "%s: its modification time cannot be set back to %d s (%s), so every start compares it",
            path,
            contents.written_s,
            error.strerror,
        )


def check_stretches(
    path: Path, contents: Contents, progress: Callable[[int, int], None] | None = None
) -> None:
    """Read every byte, on all cores, and verify the checksums; progress receives (bytes done, bytes in all).

    Raises ModelLoadError naming the changed part.
    """
    stretches = list(contents.stretches())
    total = sum(stretch.num_bytes for _, stretch in stretches)
    done = 0
    with path.open("rb") as stream, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        checks = pool.map(partial(_crc32, stream.fileno()), (stretch for _, stretch in stretches))
        for (name, stretch), crc32 in zip(stretches, checks, strict=True):
            if crc32 != stretch.crc32:
                pool.shutdown(wait=False, cancel_futures=True)
                _refuse(
                    path, f"{name} have CRC {crc32:08x}, expected {stretch.crc32:08x}: the file was changed"
                )
            done += stretch.num_bytes
            if progress is not None:
                progress(done, total)


def _crc32(file: int, stretch: Stretch) -> int:
    crc32 = 0
    for offset in range(stretch.offset, stretch.end, _PIECE_BYTES):
        crc32 = zlib.crc32(os.pread(file, min(_PIECE_BYTES, stretch.end - offset), offset), crc32)
    return crc32


class PanelSource(TensorSource):
    """The tensors of a packed model: rows of the dense ones; for experts only names, shapes and formats."""

    def __init__(self, path: Path, contents: Contents) -> None:
        entries = {
            name: TensorEntry(
                name=name,
                file=path,
                dtype=tensor.format,
                shape=tensor.shape,
                offset=0 if tensor.stretch is None else tensor.stretch.offset,
                num_bytes=tensor.num_bytes,
                format=tensor.format,
            )
            for name, tensor in contents.tensors.items()
        }
        super().__init__(path, entries)
        self._in_panels = {name for name, tensor in contents.tensors.items() if tensor.stretch is None}

    def _elements(self, entry: TensorEntry, format: str) -> npt.NDArray[Any]:
        if entry.name in self._in_panels:
            raise ModelLoadError(
                f"{self.where}: holds tensor {entry.name} as packed panels alone; use the model that it was packed from"
            )
        return super()._elements(entry, format)

    def _page_ranges(self, names: Iterable[str]) -> Iterator[tuple[Path, int, int]]:
        return super()._page_ranges(name for name in names if name not in self._in_panels)
