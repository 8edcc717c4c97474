"""A model's tensors with an adapter merged into them: W + B A in float32, computed on every read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from twofold import _core
from twofold.adapters.adapter import Adapter
from twofold.adapters.base_shapes import GATE_UP, PARTS, BaseExperts, BaseShapes
from twofold.api.errors import ConfigError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.block_weights import BlockWeights
from twofold.models.model_files import ModelFiles
from twofold.step.adapters import shapes_of
from twofold.weights.tensor_source import F32, TensorEntry, TensorSource
from twofold.weights.weight_format import WeightMatrix

ENDS: Final = frozenset({"model.embed_tokens", "lm_head"})


def merged_files(files: ModelFiles, adapter: Adapter, pool: ops.ThreadPool) -> ModelFiles:
    """The model with `adapter` merged into its tensors.

    Raises ConfigError if the adapter changes one of two matrices that the model ties.
    """
    if files.config.head.tied and (ENDS & (adapter.products.keys() | adapter.replaced.keys())):
        raise ConfigError(
            f"adapter {adapter.name} changes the embedding or the head, which this model ties: it cannot be merged; "
            "serve it with --lora-modules"
        )
    tensors = MergedTensors(files.tensors, adapter, _expert_tensors(files, shapes_of(files)), pool)

    def merged(weights: BlockWeights) -> BlockWeights:
        return BlockWeights(tensors, weights.specs, recoding=weights.recoding)

    return replace(
        files,
        tensors=tensors,
        embedding=merged(files.embedding),
        layers=tuple(tuple((block, merged(weights)) for block, weights in layer) for layer in files.layers),
        head=merged(files.head),
    )


class MergedTensors(TensorSource):
    """Reads another source; tensors that the adapter changes are float32."""

    def __init__(
        self,
        source: TensorSource,
        adapter: Adapter,
        experts: Mapping[str, _ExpertTensor],
        pool: ops.ThreadPool,
    ) -> None:
        self._source, self._adapter, self._experts, self._pool = source, adapter, experts, pool
        super().__init__(source.where, {name: self._entry(source.entry(name)) for name in source})

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        return (
            "f32"
            if self._changes(name) and self._source.check(name, shape)
            else self._source.check(name, shape)
        )

    def companions(self, name: str) -> tuple[str, ...]:
        return self._source.companions(name)

    def is_same(self, name: str, other: str) -> bool:
        return not self._changes(name) and not self._changes(other) and self._source.is_same(name, other)

    def stack(self, name: str, shape: tuple[int, ...]) -> list[WeightMatrix]:
        return list(self._merged(name, self._source.stack(name, shape)))

    def vector(self, name: str, shape: tuple[int, ...]) -> F32:
        return self._source.vector(name, shape)

    @property
    def mappings(self) -> Iterable[_core.FileMapping]:
        return self._source.mappings

    def will_read(self, names: Iterable[str]) -> None:
        self._source.will_read(names)

    def release_pages(self, names: Iterable[str]) -> None:
        self._source.release_pages(names)

    def _entry(self, entry: TensorEntry) -> TensorEntry:
        if not self._changes(entry.name):
            return entry
        num_bytes = 4 * math.prod(entry.shape)
        return replace(entry, format="f32", dtype="F32", num_bytes=num_bytes, scales=None, recoded_bytes=None)

    def _changes(self, name: str) -> bool:
        """Whether the adapter changes a tensor."""
        experts = self._experts.get(name)
        count = 1 if experts is None else experts.facts.num_experts
        return any(True for index in range(count) for _ in self._keys(name, index))

    def _merged(self, name: str, matrices: Sequence[WeightMatrix]) -> Iterator[WeightMatrix]:
        if not self._changes(name):
            yield from matrices
            return
        experts = self._experts.get(name)
        for index, matrix in enumerate(matrices):
            values = np.array(ops.dequantise(self._pool, matrix))
            turned = experts is not None and experts.is_turned(values.shape)
            for key, rows in self._keys(name, index):
                self._change(values.T[rows] if turned else values[rows], key)
            yield WeightMatrix(values, "f32", matrix.columns)

    def _change(self, values: F32, key: str) -> None:
        """Change a matrix, or some rows of one, in place."""
        if (whole := self._adapter.replaced.get(key)) is not None:
            values[:] = whole
        if (product := self._adapter.products.get(key)) is not None:
            values += product.b @ product.a

    def _keys(self, name: str, index: int) -> Iterator[tuple[str, slice]]:
        """(name in the adapter, rows) of each change to one matrix of a tensor."""
        experts = self._experts.get(name)
        keys = [(name.removesuffix(".weight"), slice(None))] if experts is None else experts.keys(index)
        for key, rows in keys:
            if key in self._adapter.products or key in self._adapter.replaced:
                yield key, rows


@dataclass(frozen=True)
class _ExpertTensor:
    """A tensor of routed experts."""

    experts: str
    """Name of the layer's experts in an adapter."""
    facts: BaseExperts
    part: str
    """gate_proj, up_proj, down_proj or gate_up_proj."""
    number: int | None
    """The one expert that it belongs to; None: it is a stack of all."""

    def is_turned(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix of this shape has its rows as columns."""
        rows, columns = self.facts.shape(self.part)
        return self.number is None and shape == (columns, rows) and (rows != columns or self.facts.transposed)

    def keys(self, index: int) -> list[tuple[str, slice]]:
        """Names in an adapter of what the index-th matrix holds, and their rows."""
        expert = f"{self.experts}.{index if self.number is None else self.number}"
        if self.part != GATE_UP:
            return [(f"{expert}.{self.part}", slice(None))]
        middle = self.facts.intermediate_size
        halves = slice(0, middle), slice(middle, None)
        if self.facts.interleaved:
            halves = slice(0, None, 2), slice(1, None, 2)
        return [(f"{expert}.{part}", rows) for part, rows in zip(PARTS, halves, strict=False)]


def _expert_tensors(files: ModelFiles, shapes: BaseShapes) -> dict[str, _ExpertTensor]:
    """Tensors of routed experts by name, but their biases."""
    blocks = [
        own
        for block, weights in files.blocks()
        if isinstance(block, ExpertBlock)
        for _, own in block.of_one_size(weights)
    ]
    found = {}
    for (experts, facts), weights in zip(shapes.experts.items(), blocks, strict=True):
        for role, spec in weights.specs.items():
            part, _, number = role.partition(".")
            if not role.endswith("_bias"):
                of_one = int(number) if number else None
                found[spec.name] = _ExpertTensor(experts, facts, f"{part}_proj", of_one)
    return found
