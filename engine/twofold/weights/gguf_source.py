"""A GGUF file's tensors under Hugging Face's names, as the model's tensor specs give them.

Apart from names there are three differences from a Hugging Face checkpoint. Several of our tensors may be one in the
file. Some families' files order the rows of q and k for rotation of adjacent pairs; they are reordered, which changes
no row. NVFP4 tensors have separate scales, which become the heads of its rows.
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
        """`specs` locate the model's tensors; others keep the file's names.

        Raises ModelLoadError for a tensor that combines several of the model's and has other rows.
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
        """Location of tensor `name`. The ModelLoadError for a missing one gives its GGUF name."""
        if name not in self:
            gguf_name = self._specs[name].gguf if name in self._specs else name
            raise ModelLoadError(
                f"{self.where}: tensor {gguf_name} is missing from the file's {len(self)} tensors; the download "
                "is incomplete or the conversion was"
            )
        return super().entry(name)

    def _entry(self, name: str, tensor: GgufTensor) -> TensorEntry:
        format, recoded_bytes = _FORMATS.get(tensor.type_name), None
        if tensor.type_name == gguf_nvfp4.TYPE:
            format, self._recoders[name] = gguf_nvfp4.FORMAT, self._nvfp4(tensor)
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
    """The rows of a tensor that belong to `spec`."""
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
