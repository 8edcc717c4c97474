"""compressed-tensors: groups of modules, each with its own weight type, selected by the configuration's patterns.

Supported are integers packed into 32-bit words ("pack-quantized"), plain 8-bit integers ("int-quantized"), 8-bit floats
with one scale a tensor or a row ("float-quantized") and NVFP4 ("nvfp4-pack-quantized"). Activations are rounded by our
kernels' own rules, regardless of the configuration. Reference: the `compressed-tensors` package (`compressors/`,
`quantization/lifecycle`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.json_file import Fields
from twofold.weights.schemes import blocks
from twofold.weights.schemes.floats import float8_matrix, nvfp4_matrix
from twofold.weights.schemes.scheme import (
    LEFT_OUT,
    SchemeMatrix,
    Stored,
    expect,
    matches,
    missing,
    no_group,
    of_modules,
    unpack,
)
from twofold.weights.tensor_source import TensorEntry

_SCALES: Final = ("BF16", "F16")
_PARTS_OF_PACKED: Final = (
    "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "input_global_scale",
)  # fmt: skip
_MODULE_CLASSES: Final = ("Linear",)
_STRATEGIES: Final[Mapping[tuple[str, int], tuple[str, ...]]] = {
    ("int", 4): ("group", "channel", "tensor"),
    ("int", 8): ("group", "channel", "tensor"),
    ("float", 8): ("tensor", "channel"),
    ("float", 4): ("tensor_group",),
}
_GROUPS_OF_NEIGHBOURS: Final = (None, False, "weight", "static")
"""Values of `actorder` for which a group has adjacent columns."""


@dataclass(frozen=True)
class _Weights:
    """One group's `weights`."""

    bits: int
    kind: Literal["int", "float"]
    strategy: str
    group_size: int
    symmetric: bool


@dataclass(frozen=True)
class CompressedTensors:
    """The groups in the configuration's order, with their targets."""

    where: str
    groups: tuple[tuple[tuple[str, ...], _Weights], ...]
    ignored: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = LEFT_OUT

    def matrices(self, entries: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
        packed = of_modules(entries, "weight_packed", _PARTS_OF_PACKED)
        plain = of_modules(entries, "weight", ("weight_scale", "weight_zero_point", "input_scale"))
        quantised = {module: parts for module, parts in plain.items() if "weight_scale" in parts}
        return [
            matrix
            for module, parts in (packed | quantised).items()
            for matrix in self._matrix(module, parts, self._weights_of(module, next(iter(parts.values()))))
        ]

    def _weights_of(self, module: str, entry: TensorEntry) -> _Weights:
        if not any(matches(pattern, module) for pattern in self.ignored):
            for targets, weights in self.groups:
                if any(target in _MODULE_CLASSES or matches(target, module) for target in targets):
                    return weights
        raise no_group(entry, module, self.where)

    def _matrix(self, module: str, parts: dict[str, TensorEntry], weights: _Weights) -> list[SchemeMatrix]:
        first = next(iter(parts.values()))
        scales = parts.get("weight_scale")
        if scales is None:
            raise missing(first, f"{module}.weight_scale")
        if weights.kind == "float" and weights.bits == 4:
            return nvfp4_matrix(module, parts, "weight_global_scale", divides=True)
        if weights.kind == "float":
            return float8_matrix(module, parts)
        fields = 32 // weights.bits
        is_packed = "weight_packed" in parts
        if len(first.shape) != 2 or 0 in first.shape or (not is_packed and weights.bits != 8):
            raise ModelLoadError(
                f"{first.file}: tensor {first.name} is {first.dtype} {list(first.shape)}, expected a matrix of "
                f"{weights.bits}-bit integers; weights and configuration belong to different models"
            )
        rows, columns = first.shape[0], first.shape[1] * (fields if is_packed else 1)
        group = weights.group_size if weights.strategy == "group" else columns
        expect(first, ("I32",) if is_packed else ("I8",), first.shape)
        if "weight_shape" in parts:
            expect(parts["weight_shape"], ("I64", "I32"), (2,))
        num_groups = 1 if weights.strategy == "tensor" else -(-columns // group)
        shape = scales.shape if weights.strategy == "tensor" else (rows, num_groups)
        expect(scales, _SCALES, shape)
        if not weights.symmetric:
            if "weight_zero_point" not in parts:
                raise missing(first, f"{module}.weight_zero_point")
            zeros = parts["weight_zero_point"]
            expect(
                zeros,
                ("I32",) if is_packed else ("I8",),
                (-(-rows // fields) if is_packed else rows, num_groups),
            )
        nibbles = weights.bits == 4 and weights.symmetric
        format = blocks.format_for(first, columns, group, nibbles=nibbles)
        made = blocks.made_entry(first, f"{module}.weight", (rows, columns), format)
        return [SchemeMatrix(made, parts, partial(_read, made, weights, is_packed))]


def _read(entry: TensorEntry, weights: _Weights, is_packed: bool, stored: Stored) -> npt.NDArray[np.uint8]:
    rows, columns = entry.shape
    half = 1 << (weights.bits - 1)
    if is_packed:
        if "weight_shape" in stored and tuple(stored["weight_shape"]) != entry.shape:
            raise ValueError(f"weight_shape is {list(stored['weight_shape'])}, expected {list(entry.shape)}")
        centred = unpack(stored["weight_packed"], weights.bits).astype(np.int16) - half
    else:
        centred = stored["weight"].astype(np.int16)
    scales = blocks.as_float16(stored["weight_scale"])
    if weights.strategy == "tensor":
        scales = np.broadcast_to(scales.reshape(1, 1), (rows, 1))
    if not weights.symmetric:
        zeros = stored["weight_zero_point"]
        if is_packed:  # packed along rows
            zeros = unpack(np.ascontiguousarray(zeros.T), weights.bits).T[:rows].astype(np.int16) - half
        centred -= np.repeat(zeros.astype(np.int16), columns // zeros.shape[1], axis=1)
    if np.abs(centred).max(initial=0) > 128 or centred.max(initial=0) > 127:
        raise ValueError("an integer that lies more than 8 bits from its zero point")
    return blocks.encode(centred.astype(np.int8), scales, entry.format or "")


def parse(section: Fields) -> CompressedTensors:
    """Parse the configuration. Raises ModelLoadError for a group with unsupported weights."""
    declared = section.section("config_groups")
    if declared is None or not declared.data:
        raise section.error("config_groups", None, "groups of modules with their weights")
    groups = []
    for name in declared.data:
        group = declared.section(name)
        weights = None if group is None else group.section("weights")
        targets: Any = None if group is None else group.data.get("targets")
        if weights is None or not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            raise declared.error(name, declared.data[name], "targets (a list of names) and weights")
        groups.append((tuple(targets), _parse_weights(weights)))
    ignored = section.data.get("ignore") or []
    if not isinstance(ignored, list) or not all(isinstance(pattern, str) for pattern in ignored):
        raise section.error("ignore", ignored, "a list of names")
    found = CompressedTensors(section.where, tuple(groups), tuple(ignored))
    for pattern in (*ignored, *(target for targets, _ in groups for target in targets)):
        try:
            matches(pattern, "")
        except re.error:
            raise section.error("targets or ignore", pattern, "a regular expression after re:") from None
    return found


def _parse_weights(weights: Fields) -> _Weights:
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
    strategy = weights.text("strategy", "tensor")
    symmetric = weights.boolean("symmetric", True)
    if (kind, bits) not in _STRATEGIES or (kind == "float" and not symmetric):
        raise weights.error(
            "num_bits", f"{bits} ({kind})", "int of 4 or 8 bits, or symmetric float of 4 or 8"
        )
    weights.only("strategy", *_STRATEGIES[kind, bits])
    if strategy == "tensor_group":
        weights.only("group_size", 16)
    if weights.data.get("actorder") not in _GROUPS_OF_NEIGHBOURS:
        raise weights.error(
            "actorder", weights.data["actorder"], "null or 'weight': groups of neighbouring columns"
        )
    if bits == 8 and not symmetric:
        raise weights.error("symmetric", False, "true for 8 bits")
    size = weights.integer("group_size", 0, minimum=0) if strategy == "group" else 0
    if strategy == "group" and size == 0:
        raise weights.error("group_size", weights.data.get("group_size"), "columns of a group")
    return _Weights(bits, "int" if kind == "int" else "float", strategy, size, symmetric)
