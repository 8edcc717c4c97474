"""A file of packed panels (`twofold pack`): what is in it and where, and its tensors as a `TensorSource`.

Layout: 32 bytes of magic, version and where the contents lie; panels of dense matrices, each on a page; all experts,
layer after layer, on 2 MiB, which is what a large page is; rows of the dense tensors; and at the end the contents, a
JSON object. Everything is little-endian. Panels lie as they lie in memory, so whoever maps the file computes from it.
Files are untrusted: every offset, length and count is checked before it is used. That a weight's bytes are those that
were written is checked where it is asked for (`check_stretches`), because that reads the whole file.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.tensor_source import TensorEntry, TensorSource
from twofold.weights.weight_format import (
    CACHE_LINE,
    FORMATS,
    packed_bytes,
    packed_expert_bytes,
    source_row_bytes,
)

PANEL_FILE: Final = "model.panels"
"""Its name in a packed model's directory."""
SUFFIX: Final = ".panels"
MAGIC: Final = b"2FPANELS"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<8sIIQQ")
"""Magic, version, CRC-32 of the contents, their offset and length."""
MAX_CONTENTS_BYTES: Final = 64 * 1024 * 1024
PAGE: Final = 4096
LARGE_PAGE: Final = 2 * 1024 * 1024
_PIECE_BYTES: Final = 16 * 1024 * 1024
_REMEDY: Final = "pack the model again with `twofold pack MODEL OUT`"


@dataclass(frozen=True)
class Stretch:
    """Bytes of the file."""

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
    """(format, rows) of each."""
    columns: int
    stretch: Stretch


@dataclass(frozen=True)
class StoredExperts:
    """All experts; the layers follow one another without gaps."""

    num_experts: int
    hidden: int
    intermediate: int
    formats: tuple[tuple[str, str, str], ...]
    """Of (gate, up, down), one for each layer."""
    stretches: tuple[Stretch, ...]
    biases: bool = False
    """Whether each has its biases behind its panels."""

    def layer_bytes(self, layer: int) -> int:
        """Each expert begins on a cache line."""
        one = packed_expert_bytes(self.formats[layer], self.hidden, self.intermediate, biases=self.biases)
        return self.num_experts * (-(-one // CACHE_LINE) * CACHE_LINE)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the model: its rows as a checkpoint has them, or no more than that it is among the panels."""

    format: str
    shape: tuple[int, ...]
    stretch: Stretch | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * source_row_bytes(self.format, self.shape[-1])


@dataclass(frozen=True)
class Contents:
    """What a file of panels says about itself."""

    layout: str
    """What its panels look like: `_core.panel_layout()` of who wrote it."""
    fingerprint: str
    """Of the model that it was made from."""
    source: str
    """That model's name, for people."""
    matrices: Mapping[str, StoredMatrix]
    experts: StoredExperts
    tensors: Mapping[str, StoredTensor]
    """Empty in a file that goes with its model (`--packed-cache`)."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def stretches(self) -> Iterator[tuple[str, Stretch]]:
        """All, with what is in them."""
        for name, matrix in self.matrices.items():
            yield name, matrix.stretch
        for layer, stretch in enumerate(self.experts.stretches):
            yield f"experts of layer {layer}", stretch
        for name, tensor in self.tensors.items():
            if tensor.stretch is not None:
                yield f"{name} (rows)", tensor.stretch

    @property
    def panels_end(self) -> int:
        """Of what a step reads: the panels; rows of tensors lie behind."""
        ends = [self.experts.stretches[-1].end, *(matrix.stretch.end for matrix in self.matrices.values())]
        return max(ends)


def read_contents(path: Path) -> Contents:
    """Read and check what `path` says about itself; nothing else is read. Raises ModelLoadError."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            prefix = stream.read(PREFIX.size)
            if prefix[: len(MAGIC)] != MAGIC or len(prefix) < PREFIX.size:
                _refuse(path, f"begins with {prefix[:8]!r}, expected {MAGIC!r}: not a file of packed panels")
            _, version, crc32, offset, num_bytes = PREFIX.unpack(prefix)
            if version != VERSION:
                _refuse(path, f"is of version {version}, expected {VERSION}: another Twofold wrote it")
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
    """Raises ValueError and its kin for whatever does not fit a file whose data end at `end`."""
    return Contents(
        layout=_text(data["layout"]),
        fingerprint=_text(data["fingerprint"]),
        source=_text(data["source"]),
        matrices={name: _matrix(each, end) for name, each in data["matrices"].items()},
        experts=_experts(data["experts"], end),
        tensors={name: _tensor(each, end) for name, each in data["tensors"].items()},
    )


def _matrix(data: Any, end: int) -> StoredMatrix:
    parts = tuple((_format(format), _count(rows)) for format, rows in data["parts"])
    columns = _count(data["columns"])
    matrix = StoredMatrix(parts, columns, _stretch(data["stretch"], end, PAGE))
    _expect(matrix.stretch.num_bytes, sum(packed_bytes(format, rows, columns) for format, rows in parts))
    return matrix


def _experts(data: Any, end: int) -> StoredExperts:
    formats = tuple((_format(gate), _format(up), _format(down)) for gate, up, down in data["formats"])
    stretches = tuple(_stretch(each, end, CACHE_LINE) for each in data["stretches"])
    num_experts, hidden, inner = (_count(data[name]) for name in ("num_experts", "hidden", "intermediate"))
    biases = data.get("biases", False)
    if not isinstance(biases, bool):
        raise ValueError(f"{biases!r} does not say whether experts have biases")
    experts = StoredExperts(num_experts, hidden, inner, formats, stretches, biases)
    _expect(len(stretches), max(1, len(formats)))
    at = stretches[0].offset
    for layer, stretch in enumerate(stretches):
        _expect(stretch.offset, at)
        _expect(stretch.num_bytes, experts.layer_bytes(layer))
        at = stretch.end
    return experts


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


def check_stretches(
    path: Path, contents: Contents, progress: Callable[[int, int], None] | None = None
) -> None:
    """Read every byte and compare it with what was written; told (bytes done, bytes in all).

    Raises ModelLoadError naming what has changed.
    """
    total = sum(stretch.num_bytes for _, stretch in contents.stretches())
    done = 0
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as stream:
        for name, stretch in contents.stretches():
            stream.seek(stretch.offset)
            crc32, left = 0, stretch.num_bytes
            while left and (count := stream.readinto(buffer[: min(left, _PIECE_BYTES)]) or 0):
                crc32 = zlib.crc32(buffer[:count], crc32)
                left -= count
                done += count
                if progress is not None:
                    progress(done, total)
            if left or crc32 != stretch.crc32:
                _refuse(
                    path, f"{name} have CRC {crc32:08x}, expected {stretch.crc32:08x}: the file was changed"
                )


class PanelSource(TensorSource):
    """The tensors of a packed model: rows of the dense ones; of experts names, shapes and formats alone."""

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
