"""Safetensors reader: a directory's file headers, parsed and checked, as the entries of a `TensorSource`.

Format: 8 bytes little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, then the data without
holes (https://github.com/huggingface/safetensors#format). Only headers are read here. Files are untrusted: every length
and offset is checked before it is used.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import open_regular
from twofold.weights.block_formats import with_block_formats
from twofold.weights.json_file import Fields, read_json_object
from twofold.weights.mxfp4_tensors import with_mxfp4
from twofold.weights.schemes.scheme import Scheme, SchemeMatrix
from twofold.weights.tensor_source import TensorEntry, TensorSource, widened

_log = logging.getLogger(__name__)

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000
"""Header size limit of the safetensors reference implementation, bytes."""

_ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
        "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
        "I32": 4, "U32": 4, "F32": 4,
        "I64": 8, "U64": 8, "F64": 8,
    }
)  # fmt: skip
_INTEGERS: Final[Mapping[str, type[np.generic]]] = MappingProxyType(
    {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
)
_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "fp8"}
)


class Checkpoint(TensorSource):
    """All tensors of a model directory's safetensors files; those of a quantisation scheme appear converted."""

    def __init__(
        self, where: Path, entries: Mapping[str, TensorEntry], made: Mapping[str, SchemeMatrix] | None = None
    ) -> None:
        super().__init__(where, entries)
        self._made = made or {}

    @classmethod
    def open(
        cls,
        directory: str | Path,
        block_formats: Mapping[str, str] | None = None,
        renamed: Iterable[tuple[str, str]] = (),
        scheme: Scheme | None = None,
        *,
        mxfp4: bool = False,
    ) -> Checkpoint:
        """Read the headers of the shards that `model.safetensors.index.json` lists, or of `model.safetensors` alone.

        Where there is an index it decides: other files, and tensors of a shard that it places elsewhere or nowhere,
        are not read.

        `block_formats`, `scheme` and `mxfp4` come from config.json's quantization_config (`block_formats.py`,
        `schemes/`, `mxfp4_tensors.py`). `renamed` has name prefixes (the files', ours); the first match counts. Raises
        ModelLoadError for a missing, truncated or inconsistent file.
        """
        directory = Path(directory)
        if (directory / INDEX_FILE).exists():
            entries = _read_shards(directory)
        elif (directory / SINGLE_FILE).exists():
            entries = read_header(directory / SINGLE_FILE)
        else:
            raise ModelLoadError(_no_checkpoint_message(directory))
        pairs = tuple(renamed)
        made = {}
        matrices = [] if scheme is None else scheme.matrices(entries)
        _report_remarks(directory, matrices)
        for matrix in matrices:
            first, *others = (part.name for part in matrix.parts.values())
            del entries[first]
            entries[matrix.entry.name] = matrix.entry
            companions = tuple(renamed_tensor(name, pairs) for name in others)
            made[renamed_tensor(matrix.entry.name, pairs)] = replace(matrix, companions=companions)
        entries = _rename(entries, pairs)
        if mxfp4:
            entries = with_mxfp4(entries)
        return cls(directory, with_block_formats(entries, block_formats or {}, directory), made)

    def companions(self, name: str) -> tuple[str, ...]:
        """Like `TensorSource.companions`, and all other stored tensors from which `name` (and its scales) are made."""
        others = super().companions(name)
        return (
            *others,
            *(part for each in (name, *others) if each in self._made for part in self._made[each].companions),
        )

    def integers(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Tensor `name`, of integers. Raises ModelLoadError for another type or shape."""
        entry = self.entry(name)
        if entry.dtype not in _INTEGERS or entry.shape != shape:
            raise ModelLoadError(
                f"{entry.file}: tensor {name} is {entry.dtype} {list(entry.shape)}, expected integers of shape "
                f"{list(shape)}; download it again"
            )
        return self._stored(entry).astype(np.int64)

    def _elements(self, entry: TensorEntry, format: str) -> npt.NDArray[Any]:
        matrix = self._made.get(entry.name)
        if matrix is None:
            return super()._elements(entry, format)
        try:
            return matrix.read({part: self._stored(of_part) for part, of_part in matrix.parts.items()})
        except ValueError as error:
            raise ModelLoadError(f"{entry.file}: tensor {entry.name}: {error}; download it again") from None

    def _stored(self, entry: TensorEntry) -> npt.NDArray[Any]:
        """Elements of a stored tensor in the file's own type; bfloat16 as float32."""
        if entry.format in ("f16", "bf16", "f32"):
            floats = widened(super()._elements(entry, entry.format), entry.format).reshape(entry.shape)
            return floats.astype(np.float16) if entry.format == "f16" else floats
        elements = super()._elements(replace(entry, format=None), "bytes")
        return elements.view(_INTEGERS.get(entry.dtype, np.uint8)).reshape(entry.shape)


def renamed_tensor(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """Our name of a checkpoint's tensor, by `renamed` of `Checkpoint.open`."""
    for old, new in renamed:
        if old.startswith("*"):
            name = name.replace(old[1:], new[1:])
    old, new = next((pair for pair in renamed if name.startswith(pair[0])), ("", ""))
    return new + name.removeprefix(old)


def _rename(
    entries: Mapping[str, TensorEntry], renamed: tuple[tuple[str, str], ...]
) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        new_name = renamed_tensor(name, renamed)
        if new_name in found:
            raise ModelLoadError(
                f"{entry.file}: tensor {name} is also there as {new_name}, expected one of them; download it again"
            )
        scales = None if entry.scales is None else renamed_tensor(entry.scales, renamed)
        found[new_name] = replace(entry, name=new_name, scales=scales)
    return found


def _report_remarks(directory: Path, matrices: Iterable[SchemeMatrix]) -> None:
    """Log each kind of matrix that is not loaded with the checkpoint's own values or size, in one line."""
    by_remark: dict[str, list[str]] = {}
    for matrix in matrices:
        if matrix.remark:
            by_remark.setdefault(matrix.remark, []).append(matrix.entry.name)
    for remark, names in by_remark.items():
        _log.info("%s: of %s (%d such tensors) %s", directory, names[0], len(names), remark)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file by name. Raises ModelLoadError for any format violation."""
    try:
        size = file.stat().st_size
        with open_regular(file) as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > size - 8:
                raise ModelLoadError(
                    f"{file}: truncated, {size} bytes, expected at least {8 + length} for the header; download it again"
                )
            if length > MAX_HEADER_BYTES:
                raise ModelLoadError(
                    f"{file}: header of {length} bytes, expected at most {MAX_HEADER_BYTES}; not a safetensors file, "
                    "download it again"
                )
            text = stream.read(length)
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: missing; download the model again") from None
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of over 4300 digits
        raise ModelLoadError(
            f"{file}: header is not JSON; not a safetensors file, download it again"
        ) from None
    if not isinstance(header, dict):
        raise ModelLoadError(
            f"{file}: header is not a JSON object; not a safetensors file, download it again"
        )
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(file, name, value, 8 + length) for name, value in header.items()}
    _check_layout(file, entries, begin=8 + length, size=size)
    return entries


def _parse_entry(file: Path, name: str, value: Any, data_begin: int) -> TensorEntry:
    damaged = ModelLoadError(
        f"{file}: header entry of tensor {name} is damaged, expected dtype, shape and data_offsets that agree; "
        "download it again"
    )
    if not isinstance(value, dict):
        raise damaged
    dtype = value.get("dtype")
    shape, offsets = _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise damaged
    begin, end = offsets
    item_bytes = _ITEM_BYTES.get(dtype)
    # An unknown dtype is reported, with its name, when the tensor is used.
    if end < begin or (item_bytes is not None and end - begin != math.prod(shape) * item_bytes):
        raise damaged
    return TensorEntry(name, file, dtype, shape, data_begin + begin, end - begin, _FORMATS.get(dtype))


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A JSON list of sane sizes as a tuple, None for anything else."""
    if not isinstance(value, list):
        return None
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**62:
            return None
    return tuple(value)


def _check_layout(file: Path, entries: Mapping[str, TensorEntry], *, begin: int, size: int) -> None:
    """The data must follow the header without holes, without overlap and to the end of the file."""
    expected = begin
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != expected:
            raise ModelLoadError(
                f"{file}: tensor {entry.name} begins at byte {entry.offset}, expected {expected}; the file is damaged, "
                "download it again"
            )
        expected += entry.num_bytes
    if size < expected:
        raise ModelLoadError(f"{file}: truncated, {size} bytes, expected {expected}; download it again")
    if size > expected:
        raise ModelLoadError(
            f"{file}: {size} bytes, expected {expected}; the file is damaged, download it again"
        )


def _read_shards(directory: Path) -> dict[str, TensorEntry]:
    index = directory / INDEX_FILE
    section = Fields(str(index), read_json_object(index, "the list of weight shards")).section("weight_map")
    if section is None or not section.data:
        raise ModelLoadError(
            f"{index}: weight_map is missing or empty, expected tensor names; download it again"
        )
    shards: dict[str, dict[str, TensorEntry]] = {}
    entries: dict[str, TensorEntry] = {}
    for name in section.data:
        shard = section.text(name)
        if shard not in shards:
            # The index is untrusted: a shard is a plain file name beside it, never a path.
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ModelLoadError(
                    f"{index}: shard {shard!r} is not a plain *.safetensors name; download it again"
                )
            if not (directory / shard).exists():
                raise ModelLoadError(
                    f"{directory / shard}: missing, but {INDEX_FILE} lists it (first for tensor {name}); "
                    "download the missing shard"
                )
            shards[shard] = read_header(directory / shard)
        entry = shards[shard].get(name)
        if entry is None:
            raise ModelLoadError(
                f"{directory / shard}: does not hold tensor {name} that {INDEX_FILE} says it does; shard and index "
                "belong to different models, download both again"
            )
        entries[name] = entry
    return entries


def _no_checkpoint_message(directory: Path) -> str:
    weights = sorted(path.name for path in directory.glob("*.safetensors"))
    if weights:
        return (
            f"{directory / INDEX_FILE}: missing, but there are {len(weights)} shards (first: {weights[0]}); "
            "download the index"
        )
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    if gguf:
        return f"{directory}: holds {gguf[0]} and no {SINGLE_FILE}; give the path of that file as the model"
    others = sorted(path.name for suffix in ("*.bin", "*.pth") for path in directory.glob(suffix))
    if others:
        return f"{directory}: holds {others[0]}, expected {SINGLE_FILE} or {INDEX_FILE}; convert it to safetensors"
    return f"{directory}: holds no {SINGLE_FILE} and no {INDEX_FILE}; download the weights"
