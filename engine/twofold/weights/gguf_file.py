"""GGUF header parser: metadata and tensor locations. Every count, length and offset is checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names, value types, tensor types and block sizes are
those of the `gguf` package. Its reader is not used: it loops over counts as the file states them (a count of 2^60 at
the end of a file never returns), and takes 7 s and 560 MB for the metadata of a 152k vocabulary. With a single parser,
the checked values are the ones that are used.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.api.regular_file import open_regular
from twofold.api.valid_text import valid_text

if TYPE_CHECKING:
    from types import ModuleType

MAX_HEADER_BYTES: Final = 256 * 1024 * 1024
MAX_STRINGS: Final = 4 * 1024 * 1024
"""Limit over the whole header: tokens and merges of the largest vocabularies are a tenth of it."""
MAX_TENSORS: Final = 1024 * 1024
MAX_DIMENSIONS: Final = 4
MAX_PARTS: Final = 10_000
SUFFIX: Final = ".gguf"

_VERSIONS: Final = (2, 3)
_SNAPSHOT: Final = re.compile(
    r"/models--(?P<organisation>[^/]+?)--(?P<repository>[^/]+)/snapshots/[0-9a-f]{40}/?\Z"
)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1024 * 1024
_PART_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_LENGTH: Final = struct.Struct("<Q")
_SCALARS: Final[Mapping[str, str]] = {
    "UINT8": "<B", "INT8": "<b", "UINT16": "<H", "INT16": "<h", "UINT32": "<I", "INT32": "<i",
    "UINT64": "<Q", "INT64": "<q", "FLOAT32": "<f", "FLOAT64": "<d", "BOOL": "<?",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """Type, shape and location of one tensor."""

    name: str
    file: Path
    type_name: str
    """Name in the gguf package, e.g. "Q4_K"."""
    shape: tuple[int, ...]
    """Rows first: the file's dimensions in reverse."""
    offset: int
    """Offset of the first byte from the start of the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """The headers of one model: a single file, or all parts of a split one."""

    path: Path
    """The file, or the first part."""
    fields: Mapping[str, Any]
    """Metadata: bool, int, float, str, numpy arrays of numbers, lists of str."""
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Read the header of `path` and, if it is the first part of a split model, of the other parts.

        Raises ModelLoadError naming the file and what is wrong with it.
        """
        path = Path(path)
        fields, tensors = read_header(path)
        count = _split_number(path, fields, "split.count", 0)
        if count > 1:
            for part in _other_parts(path, fields, count):
                part_fields, part_tensors = read_header(part)
                number = int(_PART_NAME.fullmatch(part.name)["number"]) - 1  # type: ignore[index]
                if _split_number(part, part_fields, "split.no", -1) != number:
                    raise ModelLoadError(
                        f"{part}: split.no is {part_fields.get('split.no')!r}, expected {number} from its name; parts "
                        "of different models are mixed, download them again"
                    )
                for name, tensor in part_tensors.items():
                    if name in tensors:
                        raise ModelLoadError(
                            f"{part}: tensor {name} is also in {tensors[name].file.name}; parts of different models "
                            "are mixed, download them again"
                        )
                    tensors[name] = tensor
            expected = _split_number(path, fields, "split.tensors.count", len(tensors))
            if expected != len(tensors):
                raise ModelLoadError(
                    f"{path}: its {count} parts hold {len(tensors)} tensors, expected {expected} (split.tensors.count);"
                    " download them again"
                )
        return cls(path, fields, tensors)


def model_name(path: str) -> str:
    """Display name of a model path: the directory's name, or a GGUF file's without its ending and part number.

    ORG/REPO for a snapshot in the cache of a hub, whose directory is a commit. A name that is not UTF-8 is changed to
    valid text.
    """
    path = valid_text(path)
    if snapshot := _SNAPSHOT.search(path):
        return f"{snapshot['organisation']}/{snapshot['repository']}"
    name = Path(path).name
    match = _PART_NAME.fullmatch(name)
    return match["stem"] if match else name.removesuffix(SUFFIX)


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is a GGUF file: by its name, or for an existing file by its first bytes."""
    path = Path(path)
    if path.suffix.lower() == SUFFIX:
        return not path.is_dir()
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors of one file. Raises ModelLoadError for any format violation."""
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise ModelLoadError(f"{path}: is a directory, expected a GGUF file")
        with open_regular(path) as stream:
            if size == 0:
                raise ModelLoadError(f"{path}: is empty, expected a GGUF file; download it again")
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file; check the path or download the model") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    with mapped:
        return _HeaderReader(path, mapped, size).read()


class _HeaderReader:
    """Sequential parser of one header. Only `_take` advances, and it checks the bounds."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._limit = min(size, MAX_HEADER_BYTES)
        self._at = 0
        self._num_strings = 0
        # Imported here: the package is needed only for GGUF files.
        import gguf.constants as constants

        self._constants: ModuleType = constants

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        num_tensors, num_fields = self._preamble()
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string("a metadata key")
            if key in fields:
                self._refuse(f"metadata key {key!r} occurs twice")
            fields[key] = self._value(key)
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            self._refuse(
                f"general.alignment is {alignment!r}, expected a power of two up to {_MAX_ALIGNMENT}"
            )
        described = [self._tensor() for _ in range(num_tensors)]
        data_begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for tensor, offset in described:
            if tensor.name in tensors:
                self._refuse(f"tensor {tensor.name!r} occurs twice")
            if offset % alignment:
                self._refuse(
                    f"tensor {tensor.name} begins at byte {offset} of the data, expected a multiple of {alignment}"
                )
            begin = data_begin + offset
            if begin + tensor.num_bytes > self._size:
                self._refuse(
                    f"tensor {tensor.name} ends at byte {begin + tensor.num_bytes}, but the file has {self._size} bytes"
                )
            tensors[tensor.name] = GgufTensor(
                tensor.name, self._path, tensor.type_name, tensor.shape, begin, tensor.num_bytes
            )
        self._check_overlap(tensors)
        return fields, tensors

    def _preamble(self) -> tuple[int, int]:
        magic = self._take(4, "the magic number")
        if magic != b"GGUF":
            self._refuse(f"begins with {magic!r}, expected b'GGUF'; this is not a GGUF file")
        version = self._number("<I", "the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                self._refuse("is a big-endian GGUF file, expected little-endian; convert it again")
            self._refuse(f"is GGUF version {version}, expected 2 or 3; convert the model again")
        num_tensors = self._number("<Q", "the number of tensors")
        num_fields = self._number("<Q", "the number of metadata fields")
        # A field takes at least 13 bytes (key length, type, value), a tensor at least 24.
        if num_fields * 13 + num_tensors * 24 > self._limit - self._at or num_tensors > MAX_TENSORS:
            self._refuse(
                f"announces {num_fields} metadata fields and {num_tensors} tensors, more than its {self._size} bytes "
                "can describe"
            )
        return num_tensors, num_fields

    def _value(self, key: str) -> Any:
        what = f"metadata {key}"
        kind = self._value_type(what)
        if kind == "STRING":
            return self._string(what)
        if kind != "ARRAY":
            return self._scalar(kind, what)
        element = self._value_type(what)
        count = self._number("<Q", what)
        if element == "ARRAY":
            self._refuse(f"{what} is an array of arrays, which no model uses")
        if element == "STRING":
            if count * 8 > self._limit - self._at or count + self._num_strings > MAX_STRINGS:
                self._refuse(f"{what} announces {count} strings, more than there can be")
            return self._strings(count, what)
        item = np.dtype("<u1" if element == "BOOL" else _SCALARS[element])
        if count * item.itemsize > self._limit - self._at:
            self._refuse(f"{what} announces {count} elements, more than there can be")
        array = np.frombuffer(self._take(count * item.itemsize, what), item)
        if element != "BOOL":
            return array
        if np.any(array > 1):
            self._refuse(f"{what} holds a boolean that is neither 0 nor 1")
        return array.view(np.bool_)

    def _value_type(self, what: str) -> str:
        number = self._number("<I", what)
        try:
            return str(self._constants.GGUFValueType(number).name)
        except ValueError:
            self._refuse(f"{what} has value type {number}, expected 0 to 12")

    def _scalar(self, kind: str, what: str) -> Any:
        if kind == "BOOL":
            byte = self._number("<B", what)
            if byte > 1:
                self._refuse(f"{what} is a boolean of {byte}, expected 0 or 1")
            return bool(byte)
        number = self._number(_SCALARS[kind], what)
        # The decimal number that was written, not the nearest float32: 0.8, not 0.800000011920929.
        return float(str(np.float32(number))) if kind == "FLOAT32" else number

    def _tensor(self) -> tuple[GgufTensor, int]:
        """The tensor without its file location, and its offset within the data."""
        name = self._string("a tensor's name")
        what = f"tensor {name!r}"
        num_dimensions = self._number("<I", what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._refuse(f"{what} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        dimensions = [self._number("<Q", what) for _ in range(num_dimensions)]
        number = self._number("<I", what)
        try:
            kind = self._constants.GGMLQuantizationType(number)
        except ValueError:
            self._refuse(f"{what} has type {number}, which is unknown; convert the model to Q8_0, say")
        block, block_bytes = self._constants.GGML_QUANT_SIZES[kind]
        offset = self._number("<Q", what)
        elements = 1
        for dimension in dimensions:
            elements *= dimension
            if not 0 < elements <= 2**48:
                self._refuse(f"{what} has dimensions {dimensions}, more elements than there can be, or none")
        if dimensions[0] % block:
            self._refuse(
                f"{what} is {kind.name} with rows of {dimensions[0]}, expected a multiple of {block}"
            )
        shape = tuple(reversed(dimensions))
        return GgufTensor(name, self._path, kind.name, shape, 0, elements // block * block_bytes), offset

    def _check_overlap(self, tensors: Mapping[str, GgufTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"tensors {before} and {tensor.name} overlap")
            end, before = tensor.offset + tensor.num_bytes, tensor.name

    def _string(self, what: str) -> str:
        length = self._number("<Q", what)
        self._num_strings += 1
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8 text")

    def _strings(self, count: int, what: str) -> list[str]:
        """Like repeated `_string`, without the call overhead: vocabularies have some hundred thousand strings."""
        data, at, limit = self._data, self._at, self._limit
        found: list[str] = []
        try:
            while len(found) < count and at + 8 <= limit:
                end = at + 8 + _LENGTH.unpack_from(data, at)[0]
                if end > limit:
                    break
                found.append(data[at + 8 : end].decode("utf-8"))
                at = end
        except UnicodeDecodeError:
            pass
        self._at = at
        self._num_strings += len(found)
        if len(found) < count:
            self._string(what)  # raises the error for this string
        return found

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _take(self, length: int, what: str) -> bytes:
        begin = self._at
        if length > self._limit - begin:
            if self._limit < self._size:
                self._refuse(f"{what} lies beyond the {MAX_HEADER_BYTES} bytes that a header may have")
            self._refuse(f"is cut off: {what} needs {length} bytes at byte {begin} of {self._size}")
        self._at = begin + length
        return self._data[begin : self._at]

    def _refuse(self, reason: str) -> NoReturn:
        remedy = "" if ";" in reason else "; the file is damaged, download it again"
        raise ModelLoadError(f"{self._path}: {reason}{remedy}")


def _split_number(path: Path, fields: Mapping[str, Any], key: str, default: int) -> int:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"{path}: {key} is {value!r}, expected a number; download it again")
    return value


def _other_parts(path: Path, fields: Mapping[str, Any], count: int) -> Iterator[Path]:
    """The files beside `path` that hold the rest of the model."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or count > MAX_PARTS:
        raise ModelLoadError(
            f"{path}: is a part of a model in {count} files, expected a name like model-00001-of-{count:05d}.gguf; "
            "rename the parts as they were downloaded"
        )
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    if path.name != names[0] or _split_number(path, fields, "split.no", 0) != 0:
        raise ModelLoadError(
            f"{path}: is a later part of a split model; give the first part, {names[0]}, instead"
        )
    for name in names[1:]:
        part = path.with_name(name)
        if not part.is_file():
            raise ModelLoadError(
                f"{part}: missing, but {path.name} says there are {count} parts; download it"
            )
        yield part
