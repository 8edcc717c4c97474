"""The interface of a quantisation scheme, and what schemes share.

A scheme's matrix is several stored tensors (packed integers, scales, zero points). `Scheme.matrices` locates them in
the files' headers. Each matrix becomes one tensor in a kernel format, with the same values where a format has them:
groups of a symmetric 4-bit scheme are blocks of q4_0, integers of up to 8 bits blocks of int8 or q8_0. Other matrices
become 16-bit floats, which the log reports (`SchemeMatrix.remark`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.tensor_source import TensorEntry

Stored = Mapping[str, npt.NDArray[Any]]
"""Elements by part, in the file's own type; bfloat16 as float32."""


@dataclass(frozen=True)
class SchemeMatrix:
    """One tensor converted from several stored ones."""

    entry: TensorEntry
    """Entry with our name, format and shape; file, offset and bytes are those of the first part."""
    parts: Mapping[str, TensorEntry]
    """Stored tensors to read; `entry` replaces the first."""
    read: Callable[[Stored], npt.NDArray[Any]]
    """Converts them to rows in the format's bytes. Raises ValueError for numbers that the scheme does not allow."""
    companions: tuple[str, ...] = ()
    """Names of the other parts, as used by the checkpoint's readers."""
    remark: str = ""
    """What differs from the checkpoint's values or size, for the log; "": nothing."""


IGNORED_TENSORS: Final = tuple(
    ("the checkpoint's scales of a quantised KV cache", pattern) for pattern in ("*.k_scale", "*.v_scale")
)
"""Ignored parts and their tensor patterns (`ModelConfig.left_out`): our KV cache has its own scales."""


class Scheme(Protocol):
    """One checkpoint's quantisation, as its configuration describes it."""

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Ignored parts, see `IGNORED_TENSORS`."""
        ...

    def matrices(self, entries: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
        """Convert the stored tensors' entries. Raises ModelLoadError for contradictions with the configuration."""
        ...


def matches(pattern: str, module: str) -> bool:
    """Whether a module pattern matches `module`: the whole name, its end, or "re:" and a regular expression.

    Raises re.error for an invalid expression.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.endswith(f".{pattern}")


def of_modules(
    entries: Mapping[str, TensorEntry], first: str, others: tuple[str, ...]
) -> dict[str, dict[str, TensorEntry]]:
    """Stored parts by suffix, for every module that has the part `first`."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        module, _, suffix = name.rpartition(".")
        if suffix == first:
            also = {part: entries.get(f"{module}.{part}") for part in others}
            found[module] = {first: entry} | {
                part: other for part, other in also.items() if other is not None
            }
    return found


def expect(entry: TensorEntry, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Raises ModelLoadError unless a stored tensor has one of these types and this shape."""
    if entry.dtype not in dtypes or entry.shape != shape:
        raise ModelLoadError(
            f"{entry.file}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}, expected {' or '.join(dtypes)} "
            f"{list(shape)} by its quantisation; weights and configuration belong to different models"
        )


def missing(entry: TensorEntry, name: str) -> ModelLoadError:
    """The error for a missing part `name` that belongs to `entry`."""
    return ModelLoadError(f"{entry.file}: tensor {name} is missing; download the model again")


def no_group(entry: TensorEntry, module: str, where: str) -> ModelLoadError:
    """The error for a quantised module that the configuration omits or declares unquantised."""
    return ModelLoadError(
        f"{entry.file}: tensor {entry.name} is quantised, but {where} has no group for {module}; weights and "
        "configuration belong to different models"
    )


def unpack(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
    """The fields of 32-bit words along the last dimension, lowest bits first; a field may continue in the next word."""
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)
    if bits == 4:
        each = words.view(np.uint8)
        nibbles = np.empty((*each.shape, 2), np.uint8)
        nibbles[..., 0], nibbles[..., 1] = each & 0x0F, each >> 4
        return nibbles.reshape(*each.shape[:-1], -1)
    first = np.arange(fields_of(words.shape[-1], bits)) * bits
    low = words.view(np.uint32).astype(np.uint64)
    high = np.zeros_like(low)
    high[..., :-1] = low[..., 1:] << np.uint64(32)
    shifts = (first % 32).astype(np.uint64)
    return ((low | high)[..., first // 32] >> shifts & np.uint64((1 << bits) - 1)).astype(np.uint8)


def fields_of(num_words: int, bits: int) -> int:
    """Fields in so many 32-bit words."""
    return num_words * 32 // bits
