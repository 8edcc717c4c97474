"""Layouts of routed experts' factors in safetensors files.

With E experts of one layer, rank r, and a matrix of `out` rows and `in` columns:

    one by one   EXPERTS.7.gate_proj.lora_A [r, in], .lora_B [out, r]; also w1 (gate), w3 (up), w2 (down)
    stacked      EXPERTS.gate_proj.lora_A [E or 1, r, in], .lora_B [E or 1, out, r]; 1: all experts share it. SGLang's
                 shared outer factors (A of gate and up, B of down); the other factor may be one by one. Also w1, w3, w2
    flat         EXPERTS.lora_A [r E, in], EXPERTS.lora_B [out, r E]: PEFT's `target_parameters`, and vLLM's layout

A flat A is read as [E, r, in] and B as [out, r, E]. Of several flat pairs of one module, all but the last are below
`base_layer`; names do not give the parameter (`gate_up_proj`, `down_proj`), shapes do. PEFT before 0.19.1 took `in`
for `out` where transformers keeps stacks as [E, out, in], and version 0.19.0 also where it keeps [E, in, out]. One
program writes all pairs of a file, so any pair that is not square decides for all; only then PEFT's version does.

Fused gate and up are one product with 2 x intermediate rows: both halves have the same A. The rows of gate come first,
or alternate with those of up, as the model's fused stacks do.

Sources: peft `tuners/lora/layer.py` (`ParamWrapper`), versions 0.18.1, 0.19.0 and 0.21.2; vllm
`lora/model_manager.py` (`_stack_moe_lora_weights`); sglang `srt/lora/mem_pool.py` and `lora.py`; unsloth_zoo
`temporary_patches/moe_utils.py` (`lora_B_layout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from twofold.adapters.adapter import F32
from twofold.adapters.base_shapes import GATE_UP, PARTS, BaseExperts
from twofold.adapters.factors import OTHER_MODEL, AdapterTensors, Pair, Products, misfit, read_only, scaled
from twofold.adapters.settings import AdapterSettings

_ONE: Final = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,6})\.(?P<part>\w+)", re.ASCII)
_STACK: Final = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<part>gate_proj|up_proj|down_proj|gate_up_proj|w[123])"
)
_FLAT: Final = re.compile(r"(?P<experts>.+\.experts)(?P<nested>(?:\.base_layer)*)")
_PROJECTIONS: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NORMAL: Final = (0, 19, 1)
"""First version of PEFT that takes `in` and `out` as they are."""


@dataclass
class LayerFactors:
    """Pairs of the routed experts of one layer, by layout; keys of pairs are the file's names without the factor."""

    one: dict[tuple[str, int], Pair] = field(default_factory=dict)
    """By (part, expert)."""
    stacks: dict[str, Pair] = field(default_factory=dict)
    """By part."""
    flat: dict[str, Pair] = field(default_factory=dict)
    """By the module's name in the file."""
    modules: dict[tuple[str, int | None], str] = field(default_factory=dict)
    """Name in the file of (part, expert) or (part, None), for patterns of the settings."""


def place_of(layers: dict[str, LayerFactors], module: str) -> Pair | None:
    """The pair of `module` if its name is one of routed experts, else None."""
    if found := _ONE.fullmatch(module):
        part, number = _PROJECTIONS.get(found["part"], found["part"]), int(found["number"])
        layer = layers.setdefault(found["experts"], LayerFactors())
        layer.modules.setdefault((part, number), module)
        return layer.one.setdefault((part, number), Pair())
    if found := _STACK.fullmatch(module):
        part = _PROJECTIONS.get(found["part"], found["part"])
        layer = layers.setdefault(found["experts"], LayerFactors())
        layer.modules.setdefault((part, None), module)
        return layer.stacks.setdefault(part, Pair())
    if found := _FLAT.fullmatch(module):
        return layers.setdefault(found["experts"], LayerFactors()).flat.setdefault(module, Pair())
    return None


@dataclass(frozen=True)
class _Factor:
    """One expert's factor: a matrix, or one of a stack."""

    name: str
    index: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Flat:
    """A flat pair whose parameter is known from its shapes."""

    names: tuple[str, str]
    key: str
    experts: BaseExperts
    part: str
    rank: int
    module: str
    """Name of the parameter in the trained model, for patterns."""
    swapped: bool | None
    """Whether `in` and `out` are exchanged; None: the matrix is square, either way fits."""


class ExpertReader:
    """Adds the routed experts of one file to `products`."""

    def __init__(self, tensors: AdapterTensors, settings: AdapterSettings, products: Products) -> None:
        self._tensors, self._settings, self._products = tensors, settings, products

    def read(self, layers: Mapping[str, LayerFactors]) -> None:
        """Raises ModelLoadError for the first pair that does not fit the model, or whose layout is uncertain."""
        flat: list[_Flat] = []
        for module, layer in layers.items():
            any_pair = next(
                pair for pairs in (layer.one, layer.stacks, layer.flat) for pair in pairs.values()
            )
            key = self._products.base.experts_name(module)
            if key is None:
                raise self._tensors.refused(
                    any_pair.a or any_pair.b or "", f"the model has no routed experts {module}; {OTHER_MODEL}"
                )
            experts = self._products.base.experts[key]
            for part in dict.fromkeys((*layer.stacks, *(part for part, _ in layer.one))):
                self._add_part(layer, key, experts, part)
            flat += (self._flat(pair, module, key, experts) for pair in layer.flat.values())
        for each in flat:
            self._add_flat(each, swapped=self._is_swapped(each, flat))

    # One by one, and stacked.

    def _add_part(self, layer: LayerFactors, key: str, experts: BaseExperts, part: str) -> None:
        """Add the products of one part. Fused gate and up must be of a model that keeps them one after the other."""
        factors_of_a = self._factors(layer, experts, part, lambda pair: pair.a)
        factors_of_b = self._factors(layer, experts, part, lambda pair: pair.b)
        read: dict[str, F32] = {}
        for number in sorted(factors_of_a.keys() | factors_of_b.keys()):
            a, b = factors_of_a.get(number), factors_of_b.get(number)
            names = Pair(None if a is None else a.name, None if b is None else b.name).both(self._tensors)
            assert a is not None
            assert b is not None
            if part == GATE_UP and experts.interleaved:
                raise self._tensors.refused(
                    names[1],
                    "does not tell whether rows of gate and up alternate, as the model's; save gate_proj and "
                    "up_proj instead",
                )
            module = layer.modules.get((part, number)) or layer.modules[part, None]
            rank = self._check_rank(names, (a.shape[0], b.shape[1]), module)
            if (b.shape[0], a.shape[1]) != experts.shape(part):
                given, expected = (b.shape[0], a.shape[1]), experts.shape(part)
                raise misfit((self._tensors, names[1]), f"{key}.{number}.{part}", given, expected)
            for name, scale in ((a.name, None), (b.name, self._settings.scale(module, rank))):
                if name not in read:
                    values = self._tensors.read(name)
                    read[name] = values if scale is None else scaled(values, scale, (self._tensors, name))
            of_a, of_b = (
                read[each.name] if each.index is None else read[each.name][each.index] for each in (a, b)
            )
            self._add(f"{key}.{number}", part, (of_a, of_b), experts, names[1])

    def _factors(
        self, layer: LayerFactors, experts: BaseExperts, part: str, side: Callable[[Pair], str | None]
    ) -> dict[int, _Factor]:
        """The factors of one side by expert. Raises ModelLoadError for a wrong number of dimensions or experts."""
        found: dict[int, _Factor] = {}
        for (each, number), pair in layer.one.items():
            if each != part or (name := side(pair)) is None:
                continue
            if part not in (*PARTS, GATE_UP):
                raise self._tensors.refused(
                    name, f"is of a part {part!r}, expected one of {', '.join(PARTS)}"
                )
            if number >= experts.num_experts:
                raise self._tensors.refused(
                    name, f"is of expert {number}, expected 0 to {experts.num_experts - 1}; {OTHER_MODEL}"
                )
            found[number] = _Factor(name, None, self._matrix_shape(name))
        name = side(layer.stacks[part]) if part in layer.stacks else None
        if name is None:
            return found
        shape = self._tensors.shape(name)
        if len(shape) != 3 or shape[0] not in (1, experts.num_experts):
            raise self._tensors.refused(
                name,
                f"has shape {list(shape)}, expected [{experts.num_experts} or 1, ..., ...] for a stack of experts",
            )
        if found:
            raise self._tensors.refused(
                name, f"is also there one by one, as {next(iter(found.values())).name}"
            )
        stacked = range(experts.num_experts)
        return {number: _Factor(name, number if shape[0] > 1 else 0, shape[1:]) for number in stacked}

    def _matrix_shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensors.shape(name)
        if len(shape) != 2:
            raise self._tensors.refused(name, f"has shape {list(shape)}, expected two dimensions")
        return shape

    # Flat.

    def _flat(self, pair: Pair, module: str, key: str, experts: BaseExperts) -> _Flat:
        names = pair.both(self._tensors)
        a, b = (self._matrix_shape(name) for name in names)
        for name, size in zip(names, (a[0], b[1]), strict=True):
            if size % experts.num_experts:
                raise self._tensors.refused(
                    name, f"has {size} ranks of experts, expected a multiple of {experts.num_experts} experts"
                )
        ranks = a[0] // experts.num_experts, b[1] // experts.num_experts
        given = b[0], a[1]
        sizes = {part: experts.shape(part) for part in (GATE_UP, "down_proj")}
        fitting = [
            part for part, (rows, columns) in sizes.items() if given in ((rows, columns), (columns, rows))
        ]
        if len(fitting) != 1:
            expected = " or ".join(f"{list(size)} ({part})" for part, size in sizes.items())
            raise self._tensors.refused(
                names[1],
                f"changes {key} as [rows, columns] {list(given)}, expected {expected}; {OTHER_MODEL}",
            )
        rows, columns = sizes[fitting[0]]
        parameter = f"{module}.{fitting[0]}"
        rank = self._check_rank(names, ranks, parameter)
        swapped = None if rows == columns else given != (rows, columns)
        return _Flat(names, key, experts, fitting[0], rank, parameter, swapped)

    def _is_swapped(self, pair: _Flat, flat: list[_Flat]) -> bool:
        """Whether `in` and `out` are exchanged in `pair`. Raises ModelLoadError if nothing tells."""
        ways = {each.swapped for each in flat} - {None}
        if len(ways) == 1:
            return bool(ways.pop())
        if ways:
            swapped = next(each for each in flat if each.swapped)
            raise self._tensors.refused(
                swapped.names[0],
                "has `in` and `out` exchanged, other tensors have not; expected one layout in a file",
            )
        version = self._settings.version
        if version is not None and not pair.experts.transposed:
            return version < _NORMAL
        if version is not None and version < (0, 19):
            return False
        raise self._tensors.refused(
            pair.names[0],
            f"is square, and peft_version {'is missing' if version is None else '.'.join(map(str, version))} in "
            f"{self._settings.file.name} does not tell whether `in` and `out` are exchanged; save the experts one by "
            "one (experts.N.gate_proj.lora_A)",
        )

    def _add_flat(self, pair: _Flat, *, swapped: bool) -> None:
        count, rank, (name_a, name_b) = pair.experts.num_experts, pair.rank, pair.names
        grouped = self._columns_by_expert(pair)
        a, b = self._tensors.read(name_a), self._tensors.read(name_b)
        of_a = a.reshape(count, rank, -1)
        if grouped:
            of_b = b.reshape(-1, count, rank).transpose(1, 0, 2)
        else:  # as b.reshape(-1, rank, count).transpose(2, 0, 1), in half the time
            of_b = np.ascontiguousarray(b.reshape(-1, count).T).reshape(count, -1, rank)
        if swapped:
            of_a, of_b = of_b.transpose(0, 2, 1), of_a.transpose(0, 2, 1)
        of_a, of_b = np.ascontiguousarray(of_a), np.ascontiguousarray(of_b)
        of_b = scaled(of_b, self._settings.scale(pair.module, rank), (self._tensors, name_b))
        for number in range(count):
            self._add(f"{pair.key}.{number}", pair.part, (of_a[number], of_b[number]), pair.experts, name_b)

    def _columns_by_expert(self, pair: _Flat) -> bool:
        """Whether each expert's columns of B are adjacent, Unsloth's older layout. Raises ModelLoadError if unknown."""
        columns = self._settings.expert_columns
        if columns is None and self._settings.by_unsloth and pair.rank > 1 < pair.experts.num_experts:
            raise self._tensors.refused(
                pair.names[1],
                f"was written by Unsloth, whose order of columns changed, and {self._settings.file.name} has no "
                "lora_B_layout; set it to rank_major, or to grouped_by_expert for one trained before September 2026",
            )
        return columns == "grouped_by_expert"

    # Both.

    def _add(self, expert: str, part: str, factors: tuple[F32, F32], experts: BaseExperts, name: str) -> None:
        """Add one expert's pair; fused gate and up become two products with one `a`."""
        where = self._tensors, name
        a, b = read_only(factors[0]), factors[1]
        if part != GATE_UP:
            self._products.add(f"{expert}.{part}", a, read_only(b), where)
            return
        middle = experts.intermediate_size
        gate, up = (b[0::2], b[1::2]) if experts.interleaved else (b[:middle], b[middle:])
        self._products.add(f"{expert}.gate_proj", a, read_only(gate), where)
        self._products.add(f"{expert}.up_proj", a, read_only(up), where)

    def _check_rank(self, names: tuple[str, str], ranks: tuple[int, int], module: str) -> int:
        return self._products.check_rank(self._tensors, names, ranks, self._settings.rank_of(module))
