"""Quantisation recipe: each tensor's format, and creation of its bytes, one matrix at a time.

`rules.py` gives a matrix's format; a router's gate, norms and biases are unchanged. If a row does not fill whole blocks
of its format, the nearest format with smaller blocks is used (`FALLBACKS`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from twofold.blocks import ops
from twofold.blocks.block import Block, ExpertBlock, ModelPart
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.recoding import recoded_rows
from twofold.models.model_files import ModelFiles
from twofold.quantise.rules import Rules
from twofold.weights.tensor_spec import TensorSpec
from twofold.weights.weight_format import (
    BLOCK_FORMATS,
    FORMATS,
    WeightMatrix,
    distinct_formats,
    source_row_bytes,
)

TARGETS: Final = tuple(name for name in BLOCK_FORMATS if FORMATS[name].quantised)
"""Formats that a model can be quantised to."""
FALLBACKS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "q4_k": ("int4", "q4_0"),
        "q5_k": ("q8_0",),
        "q6_k": ("q8_0",),
        "int8": ("q8_0",),
        "int4": ("q4_0",),
    }
)

_PLAIN: Final = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the new model."""

    name: str
    shape: tuple[int, ...]
    """Shape of the weights: (columns,), (rows, columns) or (matrices, rows, columns)."""
    format: str
    num_bytes: int
    pieces: Callable[[], Iterator[bytes]]
    """Yields its bytes in pieces of bounded size."""

    @property
    def is_quantised(self) -> bool:
        return self.format not in _PLAIN


@dataclass(frozen=True)
class Recipe:
    """Contents of the new model: the tensors of each file, in order. Nothing is read before they are requested."""

    files: tuple[tuple[OutputTensor, ...], ...]
    """One for each layer, and one for embedding, head and last norm."""

    release: Callable[[int], None]
    """Releases the source's pages of a file that has been written."""

    def tensors(self) -> Iterator[OutputTensor]:
        for file in self.files:
            yield from file

    def formats(self) -> dict[str, str]:
        """Formats of the quantised tensors, by name."""
        return {tensor.name: tensor.format for tensor in self.tensors() if tensor.is_quantised}


def make_recipe(files: ModelFiles, rules: Rules, pool: ops.ThreadPool) -> Recipe:
    """The recipe for writing `files` by `rules`. Raises ModelLoadError; ConfigError for a rule that matches nothing."""
    maker = _Maker(files, rules, pool)
    layers = tuple(maker.layer(layer) for layer in files.layers)

    def release(file: int) -> None:
        if file < len(layers):
            files.release_layer(file)

    outer = maker.outer()
    rules.check_used(maker.decided, files.config.num_layers)
    return Recipe((*layers, outer), release)


def format_for(target: str, columns: int, plain: str) -> str:
    """`target`, or the best format below it whose blocks fill rows of `columns`; `plain` if none does."""
    for format in (target, *FALLBACKS.get(target, ())):
        if columns % FORMATS[format].block_columns == 0:
            return format
    return plain


class _Maker:
    def __init__(self, files: ModelFiles, rules: Rules, pool: ops.ThreadPool) -> None:
        self._files = files
        self._rules = rules
        self._pool = pool
        self.decided: list[tuple[str, int | None, TensorSpec]] = []
        """Tensors for which rules were evaluated: (kind of block, layer, tensor)."""

    def layer(self, blocks: Sequence[tuple[Block, BlockWeights]]) -> tuple[OutputTensor, ...]:
        made: list[OutputTensor] = []
        for block, weights in blocks:
            if isinstance(block, ExpertBlock):
                for group, own in block.of_one_size(weights):
                    made += self._experts(group, own)
            else:
                made += [self._tensor(block, block.layer, spec) for spec in weights.specs.values()]
        return tuple(made)

    def outer(self) -> tuple[OutputTensor, ...]:
        """Tensors outside the layers."""
        files = self._files
        parts = ((files.config.embedding, files.embedding), (files.config.head, files.head))
        owners: dict[TensorSpec, ModelPart] = {}
        for part, weights in parts:
            for spec in weights.specs.values():
                owners.setdefault(spec, part)  # a tied head is the embedding
        return tuple(self._tensor(part, None, spec) for spec, part in owners.items())

    def _tensor(self, part: ModelPart, layer: int | None, spec: TensorSpec) -> OutputTensor:
        if spec.role == "exact":
            return self._kept(spec)
        return self._matrix(spec, self._target(part, layer, spec))

    def _target(self, part: ModelPart, layer: int | None, spec: TensorSpec) -> str:
        self.decided.append((part.kind, layer, spec))
        return self._rules.format_of(part.kind, layer, self._files.config.num_layers, spec)

    def _kept(self, spec: TensorSpec) -> OutputTensor:
        """An unquantised tensor: in the source's format if plain, else float32."""
        tensors = self._files.tensors
        format = tensors.check(spec.name, spec.shape)

        def pieces() -> Iterator[bytes]:
            if len(spec.shape) == 1:
                values = tensors.vector(spec.name, (spec.shape[0],))
                yield self._encoded(values[None], kept).tobytes()
            else:
                for matrix in tensors.stack(spec.name, spec.shape):
                    yield from self._rows(spec.name, matrix, kept)

        kept = format if format in _PLAIN else "f32"
        return self._output(spec.name, spec.shape, kept, pieces)

    def _matrix(self, spec: TensorSpec, target: str) -> OutputTensor:
        rows, columns = spec.shape
        tensors = self._files.tensors
        source = tensors.check(spec.name, spec.shape)
        format = format_for(target, columns, source if source in _PLAIN else "f32")

        def pieces() -> Iterator[bytes]:
            yield from self._rows(spec.name, tensors.matrix(spec.name, (rows, columns)), format)

        return self._output(spec.name, spec.shape, format, pieces)

    def _experts(self, block: ExpertBlock, weights: BlockWeights) -> list[OutputTensor]:
        """A layer's experts, with each of the three matrices stacked over all experts."""
        made = []
        for part, spec in enumerate(block.stacked_experts(weights)):
            sources = {formats[part] for formats in distinct_formats(block.expert_formats(weights))}
            source = sources.pop() if len(sources) == 1 else "f32"
            target = self._target(block, block.layer, spec)
            format = format_for(target, spec.shape[-1], source if source in _PLAIN else "f32")

            def pieces(part: int = part, name: str = spec.name, format: str = format) -> Iterator[bytes]:
                for expert in block.experts(weights):
                    yield from self._rows(name, expert[part], format)

            made.append(self._output(spec.name, spec.shape, format, pieces))
        begin = 0
        for spec in block.stacked_biases(weights):
            end = begin + spec.shape[1]

            def biases(columns: slice = slice(begin, end)) -> Iterator[bytes]:
                values = block.biases(weights)
                assert values is not None
                yield np.ascontiguousarray(values[:, columns]).tobytes()

            made.append(self._output(spec.name, spec.shape, "f32", biases))
            begin = end
        return made

    def _rows(self, name: str, matrix: WeightMatrix, format: str) -> Iterator[bytes]:
        return recoded_rows(self._pool, self._files.tensors.where, name, matrix, format)

    def _encoded(self, values: npt.NDArray[np.float32], format: str) -> npt.NDArray[np.uint8]:
        return ops.quantise_rows(self._pool, np.ascontiguousarray(values), format)

    def _output(
        self, name: str, shape: Sequence[int], format: str, pieces: Callable[[], Iterator[bytes]]
    ) -> OutputTensor:
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        return OutputTensor(name, tuple(shape), format, rows * source_row_bytes(format, shape[-1]), pieces)
