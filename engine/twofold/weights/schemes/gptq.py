"""GPTQ and AWQ: integers packed along one dimension, a float16 scale and a zero point for each group of inputs.

Both store matrices transposed, inputs first. GPTQ with act-order sorts inputs into groups by `g_idx`, so that adjacent
inputs have different scales: such matrices are loaded as float16, rounded as in GPTQ's own kernels. References:
AutoGPTQ and GPTQModel (`qlinear`, checkpoint formats "gptq", whose zero points are stored less one, and "gptq_v2"),
AutoAWQ ("gemm").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from twofold.api.errors import ModelLoadError
from twofold.weights.json_file import Fields
from twofold.weights.schemes.granularity import ROW, Grid
from twofold.weights.schemes.integers import Integers, made_entry
from twofold.weights.schemes.scheme import (
    SchemeMatrix,
    Stored,
    expect,
    fields_of,
    missing,
    of_modules,
    unpack,
)
from twofold.weights.tensor_source import TensorEntry

_AWQ_ORDER: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Field of a word that holds each of eight adjacent outputs."""


@dataclass(frozen=True)
class Gptq:
    """Settings of all modules, except for those in `dynamic`."""

    method: Literal["gptq", "awq"]
    bits: int
    group_size: int
    """Inputs per group; -1: all."""
    symmetric: bool
    act_order: bool
    zeros_less_one: bool
    dynamic: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """GPTQModel's per-module settings: (regular expression, differing values)."""
    left_out: tuple[tuple[str, str], ...] = ()

    def matrices(self, entries: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
        found = of_modules(entries, "qweight", ("qzeros", "scales", "g_idx"))
        return [self._for(module)._matrix(module, parts) for module, parts in found.items()]

    def _for(self, module: str) -> Gptq:
        for pattern, changes in self.dynamic:
            if re.match(pattern, module):
                names = {
                    "bits": "bits",
                    "group_size": "group_size",
                    "sym": "symmetric",
                    "desc_act": "act_order",
                }
                return replace(
                    self, **{ours: changes[theirs] for theirs, ours in names.items() if theirs in changes}
                )
        return self

    def _matrix(self, module: str, parts: dict[str, TensorEntry]) -> SchemeMatrix:
        first = parts["qweight"]
        for part in ("qzeros", "scales"):
            if part not in parts:
                raise missing(first, f"{module}.{part}")
        if len(first.shape) != 2 or 0 in first.shape:
            raise ModelLoadError(
                f"{first.file}: tensor {first.name} is {first.dtype} {list(first.shape)}, expected a matrix of I32; "
                "weights and configuration belong to different models"
            )
        inputs, outputs = first.shape
        if self.method == "gptq":
            inputs = fields_of(inputs, self.bits)
        else:
            outputs = fields_of(outputs, self.bits)
        grid = ROW if self.group_size < 0 else Grid(1, min(self.group_size, inputs))  # it may be any number
        num_groups = grid.counts((outputs, inputs))[1]
        expect(first, ("I32",), first.shape)
        expect(parts["scales"], ("F16", "BF16", "F32"), (num_groups, outputs))
        expect(parts["qzeros"], ("I32",), (num_groups, -(-outputs * self.bits // 32)))
        if "g_idx" in parts:
            expect(parts["g_idx"], ("I32",), (inputs,))
        half = 1 << (self.bits - 1)
        integers = Integers(
            -half if self.symmetric else 1 - 2 * half,
            half - 1 if self.symmetric else 2 * half - 1,
            grid,
            in_order=not self.act_order,
            wide_scales=parts["scales"].dtype == "F32",
        )
        made = made_entry(first, f"{module}.weight", (outputs, inputs), integers.format(inputs))
        return SchemeMatrix(made, parts, partial(self._read, made, integers), remark=integers.remark(inputs))

    def _read(self, entry: TensorEntry, integers: Integers, stored: Stored) -> npt.NDArray[Any]:
        outputs, inputs = entry.shape
        if self.method == "gptq":
            codes = unpack(np.ascontiguousarray(stored["qweight"].T), self.bits)
            zeros = unpack(stored["qzeros"], self.bits)[:, :outputs].T.astype(np.int16) + self.zeros_less_one
        else:
            codes = _awq(stored["qweight"]).T
            zeros = _awq(stored["qzeros"])[:, :outputs].T.astype(np.int16)
        # 0 less one is stored as the largest number of the field.
        zeros &= (1 << self.bits) - 1
        scales = stored["scales"].T
        group_of = np.arange(inputs) // (integers.grid.columns or inputs)
        if "g_idx" in stored and self.act_order:
            group_of = stored["g_idx"]
            if group_of.min(initial=0) < 0 or group_of.max(initial=0) >= scales.shape[1]:
                raise ValueError(f"g_idx names a group beyond the {scales.shape[1]} there are")
        elif "g_idx" in stored and (stored["g_idx"] != group_of).any():
            raise ValueError("g_idx sorts inputs into groups, which desc_act denies")
        if self.symmetric and (zeros != 1 << (self.bits - 1)).any():
            raise ValueError(f"a zero point other than {1 << (self.bits - 1)}, which sym denies")
        centred = codes.astype(np.int16) - zeros[:, group_of]
        return integers.encode(centred, scales, None if integers.in_order else group_of)


def _awq(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    fields = unpack(words, 4).reshape(*words.shape, 8)
    return fields[..., _AWQ_ORDER].reshape(words.shape[0], -1)


def parse_gptq(section: Fields) -> Gptq:
    """Parse GPTQ's configuration. Raises ModelLoadError for unsupported settings."""
    bits = _bits(section, 2, 3, 4, 8)
    section.only("checkpoint_format", "gptq", "gptq_v2")
    declared = section.data.get("dynamic") or {}
    if not isinstance(declared, dict):
        raise section.error("dynamic", declared, "an object of patterns")
    # Modules excluded from quantisation ("-:") are stored unquantised.
    dynamic = []
    for pattern, changes in declared.items():
        if pattern.startswith("-:"):
            continue
        try:
            re.compile(pattern.removeprefix("+:"))
        except re.error:
            raise section.error("dynamic", pattern, "a regular expression") from None
        of_pattern = Fields(
            f"{section.where}: dynamic: {pattern}", changes if isinstance(changes, dict) else {}
        )
        if "bits" in of_pattern.data:
            _bits(of_pattern, 2, 3, 4, 8)
        _group_size(of_pattern)
        for flag in ("sym", "desc_act"):
            of_pattern.boolean(flag, False)
        dynamic.append((pattern.removeprefix("+:"), of_pattern.data))
    return Gptq(
        "gptq", bits, _group_size(section), section.boolean("sym", True), section.boolean("desc_act", False),
        section.text("checkpoint_format", "gptq") == "gptq", tuple(dynamic),
    )  # fmt: skip


def parse_awq(section: Fields) -> Gptq:
    """Parse AWQ's configuration. Raises ModelLoadError for unsupported settings."""
    bits = _bits(section, 4)
    version = section.text("version", "gemm")
    if version.lower() != "gemm":
        raise section.error("version", version, "'gemm'")
    section.only("zero_point", True)
    return Gptq("awq", bits, _group_size(section), False, False, False)


def _bits(section: Fields, *known: int) -> int:
    bits = section.integer(("bits", "w_bit"), 4)
    if bits not in known:
        raise section.error("bits", bits, " or ".join(map(str, known)))
    return bits


def _group_size(section: Fields) -> int:
    _, size = section.get(("group_size", "q_group_size"))
    if size is None:
        return 128
    if isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or size > 0):
        raise section.error("group_size", size, "columns of a group, or -1 for all")
    return size
