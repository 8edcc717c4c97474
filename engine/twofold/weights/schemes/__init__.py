"""Quantisation schemes of Hugging Face checkpoints: how config.json names them and how their tensors become ours.

A scheme's matrix is several stored tensors (packed integers, scales, zero points). `Scheme.matrices` finds them in the
files' headers; each becomes one tensor in a format that the kernels compute on, with the same values: groups of a
symmetric 4-bit scheme are blocks of q4_0, integers of up to 8 bits blocks of int8 or q8_0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.json_file import Fields
from twofold.weights.tensor_source import TensorEntry

Stored = Mapping[str, npt.NDArray[Any]]
"""Part → its elements in the file's own type; bfloat16 as float32."""


@dataclass(frozen=True)
class SchemeMatrix:
    """One tensor of ours that stored ones make."""

    entry: TensorEntry
    """Under our name, in our format and shape; file, offset and bytes are those of the first part."""
    parts: Mapping[str, TensorEntry]
    """What is read for it; the first is what `entry` stands for."""
    read: Callable[[Stored], npt.NDArray[Any]]
    """Its rows in the format's own bytes. Raises ValueError for numbers that the scheme does not allow."""
    companions: tuple[str, ...] = ()
    """Names of the other parts, as the checkpoint's readers know them."""


LEFT_OUT: Final = tuple(
    ("the checkpoint's scales of a quantised KV cache", pattern) for pattern in ("*.k_scale", "*.v_scale")
)
"""What is not run, and a pattern of its tensors (`ModelConfig.left_out`): our cache has scales of its own."""


class Scheme(Protocol):
    """One checkpoint's quantisation, as its configuration describes it."""

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """As `LEFT_OUT`."""
        ...

    def matrices(self, entries: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
        """Of the stored tensors. Raises ModelLoadError for what contradicts the configuration."""
        ...


def parse_scheme(section: Fields) -> Scheme | None:
    """Of `quantization_config`; None for a method that is none of these. Raises ModelLoadError."""
    method = section.text("quant_method", "?")
    if method == "compressed-tensors":
        from twofold.weights.schemes import compressed_tensors

        return compressed_tensors.parse(section)
    if method in ("gptq", "awq"):
        from twofold.weights.schemes import gptq

        return gptq.parse_gptq(section) if method == "gptq" else gptq.parse_awq(section)
    if method in ("modelopt", "modelopt_fp4"):
        from twofold.weights.schemes import modelopt

        return modelopt.parse(section)
    return None


METHODS = ("compressed-tensors", "gptq", "awq", "modelopt")


def matches(pattern: str, module: str) -> bool:
    """Whether a configuration's name of modules means `module`: all of it, its end, or "re:" and a regular expression.

    Raises re.error for an expression that is none.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.endswith(f".{pattern}")


def of_modules(
    entries: Mapping[str, TensorEntry], first: str, others: tuple[str, ...]
) -> dict[str, dict[str, TensorEntry]]:
    """Module → its stored parts by their suffix, for every module that has the part `first`."""
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
    """Raises ModelLoadError unless a stored tensor is of one of these types and this shape."""
    if entry.dtype not in dtypes or entry.shape != shape:
        raise ModelLoadError(
            f"{entry.file}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}, expected {' or '.join(dtypes)} "
            f"{list(shape)} by its quantisation; weights and configuration belong to different models"
        )


def missing(entry: TensorEntry, name: str) -> ModelLoadError:
    """The error for a part `name` that belongs to `entry` and is not there."""
    return ModelLoadError(f"{entry.file}: tensor {name} is missing; download the model again")


def no_group(entry: TensorEntry, module: str, where: str) -> ModelLoadError:
    """The error for a quantised module of which the configuration says nothing, or that it is not."""
    return ModelLoadError(
        f"{entry.file}: tensor {entry.name} is quantised, but {where} has no group for {module}; weights and "
        "configuration belong to different models"
    )


def unpack(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
    """The fields of 32-bit words along the last dimension, lowest bits first."""
    each = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return each
    nibbles = np.empty((*each.shape, 2), np.uint8)
    nibbles[..., 0], nibbles[..., 1] = each & 0x0F, each >> 4
    return nibbles.reshape(*each.shape[:-1], -1)
