"""A model directory or GGUF file opened and checked: configuration and headers, no weights read.

What `load_model` begins with, and all that is needed to say how large a model is (`sizing.py`). Blocks meet their
tensors here: each is asked what it is made of, in the names that this checkpoint has, and the headers are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import F32, Block, BlockWeights, ExpertBlock, ModelPart
from twofold.blocks.panels import PACKED_WHEN_LOADED, MappedPanels, Panels
from twofold.blocks.recoding import RecodedExperts, Recoding
from twofold.models.config import ModelConfig, WeightDType, directory_quantization
from twofold.models.registry import read_config, read_gguf_config
from twofold.weights.checkpoint import Checkpoint
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.gguf_source import GgufSource
from twofold.weights.panel_file import PANEL_FILE, PanelSource
from twofold.weights.tensor_source import TensorSource
from twofold.weights.tensor_spec import Found, TensorSpec
from twofold.weights.weight_format import ExpertWeights, LayerExperts

_log = logging.getLogger(__name__)

_PLAIN: Final[Mapping[str, WeightDType]] = MappingProxyType(
    {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
)


@dataclass(frozen=True)
class LoadProgress:
    """How far loading has come. The totals cover the whole stage and never change during it."""

    stage: Literal["packing", "dense weights", "experts"]
    current: str
    """What was just done: a layer, or the head."""
    bytes_done: int
    """Of the files."""
    bytes_total: int
    steps_done: int
    steps_total: int


ProgressFn = Callable[[LoadProgress], None]
OpenBlock = tuple[Block, BlockWeights]


@dataclass(frozen=True)
class ModelFiles:
    """A model's parts with their tensors: every one is in `tensors`, with the shape that its part asks for."""

    config: ModelConfig
    """`dtype` is that of the checkpoint's embedding where that is a plain one, whatever config.json said."""
    tensors: TensorSource
    embedding: BlockWeights
    layers: tuple[tuple[OpenBlock, ...], ...]
    head: BlockWeights
    panels: Panels = PACKED_WHEN_LOADED

    @property
    def file_bytes(self) -> int:
        """Of the weights on disk."""
        return sum(self.tensors.entry(name).num_bytes for name in self.tensors)

    @property
    def mapped(self) -> MappedPanels | None:
        """The file of panels that it runs from, where there is one."""
        return self.panels if isinstance(self.panels, MappedPanels) else None

    def from_panels(self, panels: Panels) -> ModelFiles:
        """The same model, packed by or mapped from `panels`."""
        return replace(
            self,
            panels=panels,
            embedding=self.embedding.from_panels(panels),
            layers=tuple(
                tuple((block, weights.from_panels(panels)) for block, weights in layer)
                for layer in self.layers
            ),
            head=self.head.from_panels(panels),
        )

    def recoded(self, recodings: Sequence[Recoding | None]) -> ModelFiles:
        """The same model, each of `parts` read in another format, or None: as the files have it."""
        embedding, *of_blocks, head = recodings
        remaining = iter(of_blocks)
        return replace(
            self,
            embedding=self.embedding.recoded(embedding),
            layers=tuple(
                tuple((block, weights.recoded(next(remaining))) for block, weights in layer)
                for layer in self.layers
            ),
            head=self.head.recoded(head),
        )

    @property
    def recoded_formats(self) -> tuple[str, ...]:
        """Of each of `parts` the format that it is read in; "": as the files have it."""
        return tuple(
            weights.recoding.format if weights.recoding is not None else "" for _, weights in self.parts()
        )

    def parts(self) -> Iterator[tuple[ModelPart, BlockWeights]]:
        """Embedding, blocks and head with their tensors."""
        yield self.config.embedding, self.embedding
        yield from self.blocks()
        yield self.config.head, self.head

    def blocks(self) -> Iterator[OpenBlock]:
        for layer in self.layers:
            yield from layer

    def dense_names(self, layer: int) -> list[str]:
        """The tensors of a layer's blocks without routed experts, with what belongs to them (scales)."""
        dense = (weights for block, weights in self.layers[layer] if not isinstance(block, ExpertBlock))
        return [name for weights in dense for name in weights.names]

    def expert_names(self) -> list[list[str]]:
        """The same of the routed experts of each layer that has any."""
        return [weights.names for block, weights in self.blocks() if isinstance(block, ExpertBlock)]

    def release_layer(self, index: int) -> None:
        """Let go of the pages of a layer that has been packed or copied; see `TensorSource.release_pages`."""
        for _, weights in self.layers[index]:
            self.tensors.release_pages(weights.names)

    def expert_formats(self) -> tuple[tuple[str, str, str], ...]:
        """(gate, up, down) of every layer with experts, in order."""
        return tuple(
            block.expert_formats(weights)
            for block, weights in self.blocks()
            if isinstance(block, ExpertBlock)
        )

    def expert_weights(self, layer: int) -> Sequence[ExpertWeights]:
        """The experts of model layer `layer`, views of the mapped files; of one matrix all have the same format.

        Raises ValueError for a layer without experts, ModelLoadError where fused experts cannot be told apart.
        """
        for block, weights in self.layers[layer]:
            if isinstance(block, ExpertBlock):
                found = block.experts(weights)
                if weights.recoding is None:
                    return found
                return RecodedExperts(
                    found, weights.recoding, self.tensors.where, f"of layer {layer}'s experts"
                )
        raise ValueError(f"layer {layer} is a dense layer, it has no experts")

    def expert_biases(self, layer: int) -> F32 | None:
        """Their biases, as `ExpertBlock.biases`."""
        blocks = ((block, weights) for block, weights in self.layers[layer] if isinstance(block, ExpertBlock))
        return next((block.biases(weights) for block, weights in blocks), None)

    def expert_layers(self) -> Iterator[LayerExperts]:
        """Experts and biases of all layers that have any, in turn, for who packs them.

        Copy a layer before asking for the next. The files' pages leave this process's memory after every layer, so that
        packing never holds the experts twice.
        """
        names = self.expert_names()
        for index, layer in enumerate(self.config.moe_layers):
            for ahead in names[index : index + 3]:
                self.tensors.will_read(ahead)
            yield LayerExperts(self.expert_weights(layer), self.expert_biases(layer))
            self.tensors.release_pages(names[index])


def open_model_files(path: str | Path) -> ModelFiles:
    """Open a Hugging Face model directory, a packed one, or a GGUF file (of a split one, the first part).

    Raises ModelLoadError for whatever is missing, damaged or unsupported.
    """
    if is_gguf(path):
        file = GgufFile.open(path)
        config = read_gguf_config(file)
        specs = part_specs(config, lambda spec: spec.gguf in file.tensors)
        return check_model_files(
            config, specs, GgufSource(file, chain.from_iterable(map(dict.values, specs)))
        )
    config = read_config(path)
    if (panel_file := Path(path) / PANEL_FILE).exists():
        panels = MappedPanels(panel_file)
        packed = PanelSource(panel_file, panels.contents)
        specs = part_specs(config, lambda spec: spec.name in packed)
        return check_model_files(config, specs, packed).from_panels(panels)
    quantised = directory_quantization(Path(path))
    if quantised.scheme is not None:
        config = replace(config, left_out=(*config.left_out, *quantised.scheme.left_out))
    tensors = Checkpoint.open(
        path, quantised.block_formats, config.renamed, quantised.scheme, mxfp4=quantised.mxfp4
    )
    return check_model_files(config, part_specs(config, lambda spec: spec.name in tensors), tensors)


def model_parts(config: ModelConfig) -> list[ModelPart]:
    """Embedding, blocks, head."""
    return [config.embedding, *chain.from_iterable(config.layers), config.head]


def part_specs(config: ModelConfig, found: Found) -> list[dict[str, TensorSpec]]:
    """What each of `model_parts` is made of, in the spelling of one checkpoint."""
    return [dict(part.tensors(found)) for part in model_parts(config)]


def check_model_files(
    config: ModelConfig, specs: Sequence[Mapping[str, TensorSpec]], tensors: TensorSource
) -> ModelFiles:
    """What all file formats end in: every part with its tensors, checked against the headers.

    Raises ModelLoadError for a tensor that is missing, has the wrong dtype or shape, or that the architecture does not
    have: to leave out a bias or a scale silently would give wrong answers.
    """
    opened = [BlockWeights(tensors, of_part) for of_part in specs]
    for part, weights in zip(model_parts(config), opened, strict=True):
        part.check(weights)
    known = {name for weights in opened for name in weights.names}
    _report_left_out(config, tensors)
    ignored = (*config.ignored, *config.head.ignored, *(pattern for _, pattern in config.left_out))
    unknown = [
        name
        for name in tensors
        if name not in known and not any(fnmatch(name, pattern) for pattern in ignored)
    ]
    if unknown:
        raise ModelLoadError(
            f"{tensors.entry(unknown[0]).file}: tensor {unknown[0]} ({len(unknown)} such in all) is not part of "
            f"{config.architecture} as its configuration describes it; use the one that belongs to these weights"
        )
    embedding, *of_blocks, head = opened
    remaining = iter(of_blocks)
    layers = tuple(tuple((block, next(remaining)) for block in layer) for layer in config.layers)
    dtype = _PLAIN.get(embedding.format("table"), config.dtype)
    return ModelFiles(replace(config, dtype=dtype), tensors, embedding, layers, head)


def _report_left_out(config: ModelConfig, tensors: TensorSource) -> None:
    for part, pattern in config.left_out:
        names = [name for name in tensors if fnmatch(name, pattern)]
        if names:
            num_bytes = sum(tensors.entry(name).num_bytes for name in names)
            _log.info(
                "%s: %s is not run; left out: %d tensors %s, %.2f GB",
                tensors.where, part, len(names), pattern, num_bytes / 1e9,
            )  # fmt: skip
