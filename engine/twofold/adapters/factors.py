"""Tensors of an adapter's file, and the products that are made of pairs of them.

Shapes are checked before any data is read. Every fault is a ModelLoadError of one line, which names file and tensor,
what was given and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from twofold.adapters.adapter import F32, LowRank
from twofold.adapters.base_shapes import BaseShapes
from twofold.api.errors import ModelLoadError
from twofold.weights.tensor_source import TensorSource

_FLOATS: Final = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class AdapterTensors:
    """The tensors of one file by name."""

    file: Path
    source: TensorSource

    def refused(self, name: str, reason: str) -> ModelLoadError:
        """The error for a tensor."""
        return ModelLoadError(f"{self.file}: tensor {name}: {reason}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises ModelLoadError unless its elements are floats."""
        entry = self.source.entry(name)
        if entry.dtype not in _FLOATS:
            raise self.refused(
                name, f"is {entry.dtype}, expected one of {', '.join(_FLOATS)}; save the adapter in bfloat16"
            )
        return entry.shape

    def read(self, name: str) -> F32:
        """A float32 copy of a tensor. Raises ModelLoadError for a NaN or an infinity."""
        return self.source.vector(name, self.shape(name))


@dataclass
class Pair:
    """Names of the two factors of one product in an adapter's file; None: not found yet."""

    a: str | None = None
    b: str | None = None

    def put(self, tensors: AdapterTensors, side: str, name: str) -> None:
        """Note tensor `name` as factor `side`, "a" or "b" in any case. Raises ModelLoadError if there is one."""
        side = side.lower()
        other = self.a if side == "a" else self.b
        if other is not None:
            raise tensors.refused(name, f"is also there as {other}; expected one of them")
        setattr(self, side, name)

    def both(self, tensors: AdapterTensors) -> tuple[str, str]:
        """The two names. Raises ModelLoadError if one is missing."""
        if self.a is None or self.b is None:
            found, missing = (self.b, "A") if self.a is None else (self.a, "B")
            raise tensors.refused(
                found or "",
                f"has no partner: factor {missing} of the same module is missing; save the adapter again",
            )
        return self.a, self.b


class Products:
    """Collects the products of one adapter of `base`; every matrix has at most one."""

    def __init__(self, base: BaseShapes, max_rank: int) -> None:
        self.base = base
        self._max_rank = max_rank
        self._found: dict[str, LowRank] = {}

    @property
    def found(self) -> Mapping[str, LowRank]:
        return self._found

    def check_rank(
        self, tensors: AdapterTensors, names: tuple[str, str], ranks: tuple[int, int], expected: int | None
    ) -> int:
        """The rank of a pair with `names`. Raises ModelLoadError unless both factors have it, and it is `expected`."""
        of_a, of_b = ranks
        if of_a != of_b:
            raise tensors.refused(
                names[0], f"has rank {of_a}, but {names[1]} has rank {of_b}; expected the same"
            )
        if not 1 <= of_a <= self._max_rank:
            raise tensors.refused(names[0], f"has rank {of_a}, expected 1 to {self._max_rank}")
        if expected is not None and of_a != expected:
            raise tensors.refused(
                names[0],
                f"has rank {of_a}, expected {expected} from the adapter's settings; files of different adapters are "
                "mixed, copy both again",
            )
        return of_a

    def check_shape(self, where: tuple[AdapterTensors, str], key: str, given: tuple[int, int]) -> None:
        """Raises ModelLoadError unless `key` is a matrix with `given` (rows, columns). `where`: file and tensor."""
        expected = self.base.shape_of(key)
        if expected != given:
            raise misfit(where, key, given, expected)

    def add(self, key: str, a: F32, b: F32, where: tuple[AdapterTensors, str]) -> None:
        """Add b @ a as the change of matrix `key`; `b` is scaled. `where`: file and tensor to name in errors.

        Raises ModelLoadError if the matrix has another shape, or a change already.
        """
        self.check_shape(where, key, (b.shape[0], a.shape[1]))
        if key in self._found:
            raise where[0].refused(
                where[1], f"changes {key}, which another tensor of the adapter changes too"
            )
        self._found[key] = LowRank(a, b)


OTHER_MODEL: Final = "the adapter was trained for another model"


def misfit(
    where: tuple[AdapterTensors, str], key: str, given: tuple[int, int], expected: tuple[int, int] | None
) -> ModelLoadError:
    """The error for a change of another shape than the base's matrix. `where`: file and tensor."""
    shape = "no such matrix" if expected is None else list(expected)
    return where[0].refused(
        where[1], f"changes {key} as [rows, columns] {list(given)}, but the model has {shape}; {OTHER_MODEL}"
    )


def read_only(array: F32) -> F32:
    """The array, contiguous and protected from writing."""
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array


def scaled(b: F32, scale: float, where: tuple[AdapterTensors, str]) -> F32:
    """`b` times `scale`, in place. Raises ModelLoadError if that exceeds float32."""
    tensors, name = where
    largest = float(np.abs(b).max(initial=0.0))
    if not math.isfinite(scale) or largest * abs(scale) > float(np.finfo(np.float32).max):
        raise tensors.refused(
            name, f"times its scale {scale:g} exceeds float32; expected alpha / rank near 1"
        )
    b *= np.float32(scale)
    return b
