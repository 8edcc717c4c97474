"""compressed-tensors: groups of modules, each with its own weight type, selected by the configuration's patterns.

Supported are integers of 2 to 8 bits, packed into 32-bit words ("pack-quantized") or each in a byte ("int-quantized"),
and floats of 8 ("float-quantized", "mxfp8-quantized"), 6 and 4 bits ("mxfp6-", "mxfp4-" and "nvfp4-pack-quantized"),
with scales for tensors, rows, groups or blocks. Activations are rounded by our kernels' own rules, regardless of the
configuration. Reference: the `compressed-tensors` package (`compressors/`, `quantization/lifecycle`).
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
from twofold.weights.schemes.floats import float8_matrix, mx_matrix, nvfp4_matrix
from twofold.weights.schemes.granularity import ROW, TENSOR, Grid, grid_of
from twofold.weights.schemes.integers import Integers, made_entry
from twofold.weights.schemes.scheme import (
    IGNORED_TENSORS,
    SchemeMatrix,
    Stored,
    expect,
    fields_of,
    matches,
    missing,
    no_group,
    of_modules,
    unpack,
)
from twofold.weights.tensor_source import TensorEntry

_PARTS: Final = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale")
_OF_ACTIVATIONS: Final = ("input_global_scale", "input_scale", "input_zero_point")
_MODULE_CLASSES: Final = ("Linear",)
_BITS: Final[Mapping[str, tuple[int, ...]]] = {"int": tuple(range(2, 9)), "float": (4, 6, 8)}
_STRATEGIES: Final = ("tensor", "channel", "group", "tensor_group", "block")


@dataclass(frozen=True)
class _Weights:
    """One group's `weights`."""

    bits: int
    kind: Literal["int", "float"]
    grid: Grid
    symmetric: bool
    in_order: bool
    """Whether a group has adjacent columns: "actorder" is not "group"."""
    of_tensor: bool
    """Whether scales are multiplied by one of the tensor (NVFP4)."""


@dataclass(frozen=True)
class CompressedTensors:
    """The groups in the configuration's order, with their targets."""

    where: str
    groups: tuple[tuple[tuple[str, ...], _Weights], ...]
    ignored: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = IGNORED_TENSORS

    def matrices(self, entries: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
        others = (*_PARTS, *_OF_ACTIVATIONS)
        plain = of_modules(entries, "weight", others)
        quantised = {module: parts for module, parts in plain.items() if "weight_scale" in parts}
        return [
            matrix
            for module, parts in (of_modules(entries, "weight_packed", others) | quantised).items()
            for matrix in self._matrix(module, parts, self._weights_of(module, next(iter(parts.values()))))
        ]

    def _weights_of(self, module: str, entry: TensorEntry) -> _Weights:
        if not any(matches(pattern, module) for pattern in self.ignored):
            for targets, weights in self.groups:
                if any(target in _MODULE_CLASSES or matches(target, module) for target in targets):
                    return weights
        raise no_group(entry, module, self.where)

    def _matrix(self, module: str, parts: dict[str, TensorEntry], weights: _Weights) -> list[SchemeMatrix]:
        first, name = next(iter(parts.values())), f"{module}.weight"
        if "weight_scale" not in parts:
            raise missing(first, f"{module}.weight_scale")
        if weights.kind == "int":
            return [_integers(module, parts, weights)]
        if weights.of_tensor:
            return nvfp4_matrix(module, parts, "weight_global_scale", divides=True)
        if weights.bits == 8:
            return float8_matrix(name, parts, "weight_scale", weights.grid)
        return mx_matrix(name, parts, "weight_scale", weights.bits, weights.grid)


def _integers(module: str, parts: dict[str, TensorEntry], weights: _Weights) -> SchemeMatrix:
    first, is_packed = next(iter(parts.values())), "weight_packed" in parts
    expect(first, ("I32",) if is_packed else ("I8",), first.shape)
    if len(first.shape) != 2 or 0 in first.shape:
        raise ModelLoadError(
            f"{first.file}: tensor {first.name} has shape {list(first.shape)}, expected a matrix; weights and "
            "configuration belong to different models"
        )
    rows, columns = first.shape
    if is_packed:
        columns = fields_of(columns, weights.bits)
    if "weight_shape" in parts:
        expect(parts["weight_shape"], ("I64", "I32"), (2,))
    scales = parts["weight_scale"]
    grid = grid_of(scales, (rows, columns), weights.grid)
    half, lowest, highest = 1 << (weights.bits - 1), 0, 0
    if not weights.symmetric:
        if "weight_zero_point" not in parts:
            raise missing(first, f"{module}.weight_zero_point")
        zero_rows, zero_columns = grid.counts((rows, columns))
        stored_rows = -(-zero_rows * weights.bits // 32) if is_packed else zero_rows
        expect(parts["weight_zero_point"], ("I32",) if is_packed else ("I8",), (stored_rows, zero_columns))
        lowest, highest = 1 - half, half
    in_order = weights.in_order or "weight_g_idx" not in parts
    if not in_order:
        expect(parts["weight_g_idx"], ("I32",), (columns,))
    integers = Integers(
        lowest - half, highest + half - 1, grid, in_order=in_order, wide_scales=scales.dtype == "F32"
    )
    made = made_entry(first, f"{module}.weight", (rows, columns), integers.format(columns))
    read = partial(_read, made, integers, weights, is_packed)
    return SchemeMatrix(made, parts, read, remark=integers.remark(columns))


def _read(
    entry: TensorEntry, integers: Integers, weights: _Weights, is_packed: bool, stored: Stored
) -> npt.NDArray[Any]:
    half = 1 << (weights.bits - 1)
    if is_packed:
        if "weight_shape" in stored and tuple(stored["weight_shape"]) != entry.shape:
            raise ValueError(f"weight_shape is {list(stored['weight_shape'])}, expected {list(entry.shape)}")
        codes = unpack(stored["weight_packed"], weights.bits).astype(np.int16) - half
    else:
        codes = stored["weight"].astype(np.int16)
    scales, group_of = stored["weight_scale"], None
    if not integers.in_order:
        group_of = stored["weight_g_idx"]
        if group_of.min(initial=0) < 0 or group_of.max(initial=0) >= scales.shape[1]:
            raise ValueError(f"weight_g_idx names a group beyond the {scales.shape[1]} there are")
    if not weights.symmetric:
        zeros = stored["weight_zero_point"]
        if is_packed:  # packed along rows
            count = integers.grid.counts(entry.shape)[0]
            zeros = unpack(np.ascontiguousarray(zeros.T), weights.bits).T[:count].astype(np.int16) - half
        if group_of is None:
            codes -= integers.grid.spread(zeros.astype(np.int16), entry.shape, Grid(1, 1))
        else:
            codes -= zeros.astype(np.int16)[:, group_of]
    return integers.encode(codes, scales, group_of)


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
    known = _BITS.get(kind, ())
    if bits not in known:
        raise weights.error("num_bits", f"{bits} ({kind})", "int of 2 to 8 bits, or float of 4, 6 or 8")
    symmetric = weights.boolean("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.error("symmetric", symmetric, "true for floats, which have no zero points here")
    strategy = weights.text("strategy", "tensor")
    weights.only("strategy", "tensor", *_STRATEGIES[1:])
    grid = {"tensor": TENSOR, "channel": ROW}.get(strategy) or _blocks(weights, strategy)
    of_tensor = strategy == "tensor_group"
    if of_tensor and (kind, bits, grid) != ("float", 4, Grid(1, 16)):
        raise weights.error("strategy", strategy, "it with floats of 4 bits in groups of 16 (NVFP4) alone")
    weights.only("actorder", None, False, True, "weight", "static", "dynamic", "group")
    in_order = weights.data.get("actorder") not in (True, "group", "dynamic")
    return _Weights(bits, "int" if kind == "int" else "float", grid, symmetric, in_order, of_tensor)


def _blocks(weights: Fields, strategy: str) -> Grid:
    if strategy != "block":
        return Grid(1, weights.integer("group_size"))
    sizes = weights.integers("block_structure", minimum=1)
    if len(sizes) != 2:
        raise weights.error("block_structure", list(sizes), "rows and columns of a block")
    return Grid(*sizes)
