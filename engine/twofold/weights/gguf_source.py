"""A GGUF file's tensors under Hugging Face's names, which the model's tensor specs say.

Three things differ from a Hugging Face checkpoint beside the names. Several of our tensors may be one in the file. Some
families' files hold the rows of q and k in the order in which rotation pairs neighbours; they are put back where they
were, which moves rows and changes none. And llama.cpp's quantiser falls back to Q5_0 or Q5_1 where a row does not fill
blocks of 256 columns: these, and Q4_1, are re-encoded as Q8_0 when read. For Q5_0 that is exact (its values are small
integers times the same scale); Q4_1 and Q5_1 have a minimum as well and are rounded to 127 steps of a block's largest
magnitude. Q3_K becomes Q6_K, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights import gguf_nvfp4
from twofold.weights.gguf_file import GgufFile, GgufTensor
from twofold.weights.tensor_source import TensorEntry, TensorSource
from twofold.weights.tensor_spec import TensorSpec
from twofold.weights.weight_format import FORMATS, source_row_bytes

U8 = npt.NDArray[np.uint8]

_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {layout.gguf: name for name, layout in FORMATS.items() if layout.gguf}
)


class GgufSource(TensorSource):
    """All tensors of a GGUF file by their Hugging Face names."""

    def __init__(self, file: GgufFile, specs: Iterable[TensorSpec]) -> None:
        """`specs` say where the model's tensors are; others keep the file's names.

        Raises ModelLoadError for a tensor that should hold several of the model's and has other rows.
        """
        self.file = file
        self._specs = {spec.name: spec for spec in specs}
        self._recoders: dict[str, Callable[[U8], U8]] = {}
        others = gguf_nvfp4.without_scales(file.tensors)
        entries: dict[str, TensorEntry] = {}
        for spec in self._specs.values():
            tensor = file.tensors.get(spec.gguf)
            if tensor is not None:
                others.pop(spec.gguf, None)
                part = tensor if spec.gguf_rows is None else _some_rows(tensor, spec)
                if _without_ones(part.shape) == _without_ones(
                    spec.shape
                ):  # a matrix of one row may be a vector there
                    part = replace(part, shape=spec.shape)
                entries[spec.name] = self._entry(spec.name, part)
        entries |= {name: self._entry(name, tensor) for name, tensor in others.items()}
        super().__init__(file.path, entries)

    def entry(self, name: str) -> TensorEntry:
        """Where tensor `name` lies. Raises ModelLoadError that says what the file would call it."""
        if name not in self:
            theirs = self._specs[name].gguf if name in self._specs else name
            raise ModelLoadError(
                f"{self.where}: tensor {theirs} is missing from the file's {len(self)} tensors; the download "
                "is incomplete or the conversion was"
            )
        return super().entry(name)

    def _entry(self, name: str, tensor: GgufTensor) -> TensorEntry:
        format, recoded_bytes = _FORMATS.get(tensor.type_name), None
        recoder = _RECODERS.get(tensor.type_name) if format is None else None
        if tensor.type_name == gguf_nvfp4.TYPE:
            recoder = (gguf_nvfp4.FORMAT, self._nvfp4(tensor))
        if recoder is not None:
            format, self._recoders[name] = recoder
            recoded_bytes = math.prod(tensor.shape[:-1]) * source_row_bytes(format, tensor.shape[-1])
        return TensorEntry(
            name=name,
            file=tensor.file,
            dtype=tensor.type_name,
            shape=tensor.shape,
            offset=tensor.offset,
            num_bytes=tensor.num_bytes,
            format=format,
            recoded_bytes=recoded_bytes,
        )

    def _nvfp4(self, tensor: GgufTensor) -> Callable[[U8], U8]:
        scale = gguf_nvfp4.scale_tensor(tensor, self.file.tensors)
        entry = None if scale is None else self._entry(scale.name, scale)

        def read(raw: U8) -> U8:
            try:
                scales = None if entry is None else self._floats(entry)
                return gguf_nvfp4.with_heads(raw, tensor.shape[-1], scales)
            except ValueError as error:
                raise ModelLoadError(
                    f"{tensor.file}: tensor {tensor.name}: {error}; download it again"
                ) from None

        return read

    def _elements(self, entry: TensorEntry, format: str) -> npt.NDArray[Any]:
        elements = super()._elements(entry, format)
        recoder = self._recoders.get(entry.name)
        if recoder is not None:
            elements = recoder(elements)
        spec = self._specs.get(entry.name)
        if spec is None or not spec.gguf_heads:
            return elements
        # Row 2i + half of a head was row half * d/2 + i.
        pairs = elements.reshape(spec.gguf_heads, entry.shape[0] // spec.gguf_heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _some_rows(tensor: GgufTensor, spec: TensorSpec) -> GgufTensor:
    """The rows of a tensor that are `spec`'s."""
    assert spec.gguf_rows is not None
    first, count = spec.gguf_rows
    if tensor.shape[0] != count:
        raise ModelLoadError(
            f"{tensor.file}: tensor {tensor.name} has {tensor.shape[0]} rows, expected {count} for q, k and v; the "
            "file is damaged, download it again"
        )
    row_bytes = tensor.num_bytes // count
    offset, num_bytes = tensor.offset + first * row_bytes, spec.shape[0] * row_bytes
    return replace(tensor, shape=(spec.shape[0], *tensor.shape[1:]), offset=offset, num_bytes=num_bytes)


# ---- formats that are re-encoded as Q8_0: blocks of {f16 scale; i8 q[32]} ----


def _nibbles(packed: U8) -> U8:
    """[blocks, 16] bytes → [blocks, 32]: low nibbles are weights 0-15."""
    return np.concatenate([packed & 0xF, packed >> 4], axis=1)


def _fifth_bits(packed: U8) -> U8:
    """[blocks, 4] bytes → [blocks, 32] of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _with_scale(scale_bytes: U8, q: npt.NDArray[np.int8]) -> U8:
    return np.concatenate([scale_bytes, q.view(np.uint8)], axis=1).reshape(-1)


def _recode_q5_0(raw: U8) -> U8:
    blocks = raw.reshape(-1, 22)
    q = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    return _with_scale(blocks[:, :2], q)


def _recode_with_minimum(blocks: U8, q: U8) -> U8:
    """scale * q + minimum, both at the block's beginning, rounded to 127 steps of the largest magnitude."""
    scale_and_minimum = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a scale that is no number stays none
        values = scale_and_minimum[:, :1] * q + scale_and_minimum[:, 1:]
        scale = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127.0)).astype(np.float16)
        wide = scale.astype(np.float32)
        steps = np.divide(values, wide, out=np.zeros_like(values), where=wide != 0)
        rounded = np.nan_to_num(np.clip(np.rint(steps), -127, 127)).astype(np.int8)
    return _with_scale(scale.view(np.uint8), rounded)


def _recode_q4_1(raw: U8) -> U8:
    blocks = raw.reshape(-1, 20)
    return _recode_with_minimum(blocks, _nibbles(blocks[:, 4:]))


def _recode_q5_1(raw: U8) -> U8:
    blocks = raw.reshape(-1, 24)
    return _recode_with_minimum(blocks, _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]))


# ---- Q3_K as Q6_K: both have 16 runs of 16 columns, a scale of 6 or 8 bits for each, and one in float16 for all ----


def _recode_q3_k(raw: U8) -> U8:
    blocks = raw.reshape(-1, 110)
    high_bits, low_bits, packed, scale = np.split(blocks, (32, 96, 108), axis=1)
    # Row r of 32 columns has bit r of 32 bytes; its two lower bits are field r % 4 of half r // 4.
    rows = np.arange(8)
    high = high_bits[:, None] >> rows.astype(np.uint8)[:, None] & 1
    low = low_bits.reshape(-1, 2, 32)[:, rows // 4] >> (2 * (rows % 4)).astype(np.uint8)[:, None] & 3
    codes = low + (high << np.uint8(2)) + np.uint8(28)  # q from -4 to 3 as q + 32
    low_nibbles, high_bits_of = packed[:, :8], packed[:, 8:]
    of_scale = np.concatenate([low_nibbles & 0xF, low_nibbles >> 4], axis=1)
    shifts = np.repeat(np.array([0, 2, 4, 6], np.uint8), 4)
    of_scale |= (np.tile(high_bits_of, 4) >> shifts & 3) << np.uint8(4)
    scales = of_scale.view(np.int8) - np.int8(32)
    halves = codes.reshape(-1, 2, 4, 32)
    nibbles = halves & 0xF
    ql = (nibbles[:, :, :2] | nibbles[:, :, 2:] << np.uint8(4)).reshape(-1, 128)
    fields = halves >> 4 << (2 * np.arange(4, dtype=np.uint8))[:, None]
    qh = np.bitwise_or.reduce(fields, axis=2).reshape(-1, 64)
    return np.concatenate([ql, qh, scales.view(np.uint8), scale], axis=1).reshape(-1)


_RECODERS: Final[Mapping[str, tuple[str, Callable[[U8], U8]]]] = MappingProxyType(
    {
        "Q5_0": ("q8_0", _recode_q5_0),
        "Q4_1": ("q8_0", _recode_q4_1),
        "Q5_1": ("q8_0", _recode_q5_1),
        "Q3_K": ("q6_k", _recode_q3_k),
    }
)
REENCODED: Final = tuple(_RECODERS)
"""Tensor types that become another when read."""
