"""A model directory or GGUF file, opened and checked: configuration and headers, no weights read.

The first step of loading, and sufficient to compute a model's size (`sizing.py`). Each block reports its tensors
in this checkpoint's naming, and the headers are checked against them.
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
from twofold.blocks.block import Block, ExpertBlock, ModelPart
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.head import CLASSIFIER, HEAD
from twofold.blocks.panels import PACKED_WHEN_LOADED, MappedPanels, Panels
from twofold.blocks.recoding import RecodedExperts, Recoding
from twofold.models.config import ModelConfig, WeightDType
from twofold.models.config_json import directory_quantization
from twofold.models.picture_encoder import VISION_TOWER
from twofold.models.registry import read_config, read_gguf_config
from twofold.weights.checkpoint import Checkpoint
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.gguf_source import GgufSource
from twofold.weights.panel_file import PANEL_FILE, PanelSource
from twofold.weights.tensor_source import TensorSource
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import ExpertWeights, LayerExperts, LayerFormats

_log = logging.getLogger(__name__)

_PLAIN: Final[Mapping[str, WeightDType]] = MappingProxyType(
    {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
)


MODULES: Final = "modules.json"
"""File of sentence-transformers' directories, whose models give embeddings."""
_WITHOUT_PREFIX: Final = tuple((f"{part}.", f"model.{part}.") for part in ("layers", "embed_tokens", "norm"))
"""Names in checkpoints of a decoder without its head, as most embedding models are: (theirs, ours)."""


@dataclass(frozen=True)
class LoadProgress:
    """Loading progress. The totals cover the whole stage and never change during it."""

    stage: Literal["packing", "dense weights", "experts"]
    current: str
    """The last finished item: a layer, or the head."""
    bytes_done: int
    """Bytes of the files read."""
    bytes_total: int
    steps_done: int
    steps_total: int


MtpUse = Literal["skip", "keep", "need"]
ProgressFn = Callable[[LoadProgress], None]
OpenBlock = tuple[Block, BlockWeights]
OpenPart = tuple[ModelPart, BlockWeights]


@dataclass(frozen=True)
class ModelFiles:
    """A model's parts with their tensors: every tensor exists and has the shape that its part needs."""

    config: ModelConfig
    """Model configuration; `dtype` is that of the checkpoint's embedding if plain, whatever config.json has."""
    tensors: TensorSource
    embedding: BlockWeights
    layers: tuple[tuple[OpenBlock, ...], ...]
    head: BlockWeights
    panels: Panels = PACKED_WHEN_LOADED

    @property
    def file_bytes(self) -> int:
        """Bytes of the weights on disk."""
        return sum(self.tensors.entry(name).num_bytes for name in self.tensors)

    @property
    def mapped(self) -> MappedPanels | None:
        """The mapped file of panels; None if the model does not run from one."""
        return self.panels if isinstance(self.panels, MappedPanels) else None

    def from_panels(self, panels: Panels) -> ModelFiles:
        """The same model with matrices packed by or mapped from `panels`."""
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

    def caching_rows(self, num_bytes: int) -> ModelFiles:
        """The same model, with a cache of so many bytes for rows of its tables."""
        embedding = self.config.embedding
        if embedding.layer_inputs is None:
            return self
        inputs = replace(embedding.layer_inputs, cache_bytes=num_bytes)
        return replace(self, config=replace(self.config, embedding=replace(embedding, layer_inputs=inputs)))

    def recoded(self, recodings: Sequence[Recoding | None]) -> ModelFiles:
        """The same model with each of `parts` converted to another format, or None: the file's."""
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
        """Conversion format of each of `parts`; "": the file's format."""
        return tuple(
            weights.recoding.format if weights.recoding is not None else "" for _, weights in self.parts()
        )

    def parts(self) -> Iterator[OpenPart]:
        """Embedding, blocks and head with their tensors."""
        yield self.config.embedding, self.embedding
        yield from self.blocks()
        yield self.config.head, self.head

    def blocks(self) -> Iterator[OpenBlock]:
        for layer in self.layers:
            yield from layer

    def dense_names(self, layer: int) -> list[str]:
        """Names of the tensors of a layer's blocks without routed experts, with their companions (scales)."""
        dense = (weights for block, weights in self.layers[layer] if not isinstance(block, ExpertBlock))
        return [name for weights in dense for name in weights.names]

    def expert_names(self) -> list[list[str]]:
        """Names of the routed experts' tensors of each layer that has any, with their companions."""
        return [weights.names for block, weights in self.blocks() if isinstance(block, ExpertBlock)]

    def release_layer(self, index: int) -> None:
        """Release the pages of a layer that has been packed or copied; see `TensorSource.release_pages`."""
        for _, weights in self.layers[index]:
            self.tensors.release_pages(weights.names)

    def expert_formats(self) -> tuple[LayerFormats, ...]:
        """Formats of the experts of every layer that has any, in order."""
        return tuple(
            block.expert_formats(weights)
            for block, weights in self.blocks()
            if isinstance(block, ExpertBlock)
        )

    def expert_weights(self, layer: int) -> Sequence[ExpertWeights]:
        """The experts of model layer `layer`, views of the mapped files.

        Raises ValueError for a layer without experts, ModelLoadError if fused experts cannot be told apart.
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
        """Biases of a layer's experts, see `ExpertBlock.biases`."""
        blocks = ((block, weights) for block, weights in self.layers[layer] if isinstance(block, ExpertBlock))
        return next((block.biases(weights) for block, weights in blocks), None)

    def _expert_tensors(self, layer: int) -> BlockWeights:
        return next(weights for block, weights in self.layers[layer] if isinstance(block, ExpertBlock))

    def expert_layers(self, *, reads_ahead: bool = True) -> Iterator[LayerExperts]:
        """Experts and biases of all layers that have any, in turn, for packing. reads_ahead: start reading the next
        layers' files meanwhile; off where some of the experts are needed.

        Copy a layer before requesting the next. The files' pages leave this process's memory after every layer, so that
        packing never holds the experts twice.
        """
        names = self.expert_names()
        for index, layer in enumerate(self.config.moe_layers):
            for ahead in names[index : index + 3] if reads_ahead else ():
                self.tensors.will_read(ahead)
            yield LayerExperts(
                self.expert_weights(layer), self.expert_biases(layer), self._expert_tensors(layer).refused
            )
            self.tensors.release_pages(names[index])


def open_model_files(path: str | Path, mtp_use: MtpUse = "skip") -> ModelFiles:
    """Open a Hugging Face model directory, a packed one, or a GGUF file (for a split one, the first part).

    predictions: whether the layer that predicts the token after the next one is left out, opened if the files have it
    ("keep"), or required ("need").

    Raises ModelLoadError for missing, damaged or unsupported files.
    """
    if is_gguf(path):
        file = GgufFile.open(path)
        config = read_gguf_config(file)
        if (classifier := file.tensors.get(CLASSIFIER[1])) is not None:
            config = config.with_classifier(classifier.shape[0])
        config = _with_mtp(config, mtp_use, path, lambda spec: spec.gguf in file.tensors)
        if HEAD[1] in file.tensors:
            config = config.with_separate_head()
        specs = part_specs(config, lambda spec: spec.gguf in file.tensors)
        return check_model_files(
            config, specs, GgufSource(file, chain.from_iterable(map(dict.values, specs)))
        )
    config = read_config(path)
    if (panel_file := Path(path) / PANEL_FILE).exists():
        panels = MappedPanels(panel_file)
        packed = PanelSource(panel_file, panels.contents)
        config = _with_head_if_found(config, Path(path), packed, compares=False)
        config = config.as_stored(packed.shape_of)
        config = _with_mtp(config, mtp_use, path, lambda spec: spec.name in packed)
        specs = part_specs(config, lambda spec: spec.name in packed)
        return check_model_files(config, specs, packed).from_panels(panels)
    quantised = directory_quantization(Path(path))
    if quantised.scheme is not None:
        config = replace(config, left_out=(*config.left_out, *quantised.scheme.left_out))
    renamed = config.renamed
    if mtp_use != "skip" and config.mtp is not None:
        renamed = (*config.mtp.renamed, *renamed)
    renamed = (*renamed, *_WITHOUT_PREFIX)
    tensors = Checkpoint.open(path, quantised.block_formats, renamed, quantised.scheme, mxfp4=quantised.mxfp4)
    config = _with_head_if_found(config, Path(path), tensors).as_stored(tensors.shape_of)
    config = _with_mtp(config, mtp_use, path, lambda spec: spec.name in tensors)
    return check_model_files(config, part_specs(config, lambda spec: spec.name in tensors), tensors)


def _with_head_if_found(
    config: ModelConfig, directory: Path, tensors: TensorSource, *, compares: bool = True
) -> ModelConfig:
    """The configuration with the head that the files have.

    A head in the files that differs from the embedding is read, even if the configuration ties them, as in
    transformers. A model with neither a head nor a tie gives embeddings, and a classifier has its labels. compares:
    off where the files hold a head only if it differs.
    """
    if CLASSIFIER[0] in tensors:
        return config.with_classifier(tensors.entry(CLASSIFIER[0]).shape[0])
    if config.architecture.endswith("ForSequenceClassification"):
        raise ModelLoadError(
            f"{directory}: tensor {CLASSIFIER[0]} is missing, the classifier of {config.architecture}; download the "
            "checkpoint again"
        )
    gives_embeddings = config.architecture.endswith("Model") or (directory / MODULES).exists()
    if config.head.tied and HEAD[0] in tensors:
        table = "model.embed_tokens.weight"
        if compares and (table not in tensors or tensors.is_same(HEAD[0], table)):
            return config
        return config.with_separate_head()
    if config.head.tied or HEAD[0] in tensors or not gives_embeddings:
        return config
    return replace(
        config,
        has_head=False,
        embedding=replace(config.embedding, tied=True),
        head=replace(config.head, tied=True),
    )


def _with_mtp(config: ModelConfig, mtp_use: MtpUse, path: str | Path, found: HasTensor) -> ModelConfig:
    """The configuration with its MTP layer, if that is wanted and found."""
    layer = None if mtp_use == "skip" or config.mtp is None else config.mtp.layer
    first = next(iter(layer[0].tensors(found).values())) if layer else None
    if first is not None and found(first):
        return config.with_mtp()
    if mtp_use == "need":
        name = "the configuration names none" if first is None else first.name
        raise ModelLoadError(
            f"{path}: has no MTP layer ({name + ' is missing' if layer else name}), which method mtp of "
            "--speculative-config needs; choose another method, or give files that have one"
        )
    return config


def model_parts(config: ModelConfig) -> list[ModelPart]:
    """Parts of a model: embedding, blocks, head."""
    return [config.embedding, *chain.from_iterable(config.layers), config.head]


def part_specs(config: ModelConfig, found: HasTensor) -> list[dict[str, TensorSpec]]:
    """Tensor specs of each of `model_parts`, in one checkpoint's naming."""
    return [dict(part.tensors(found)) for part in model_parts(config)]


def check_model_files(
    config: ModelConfig, specs: Sequence[Mapping[str, TensorSpec]], tensors: TensorSource
) -> ModelFiles:
    """Build `ModelFiles` for any file format: every part with its tensors, checked against the headers.

    Raises ModelLoadError for a tensor that is missing, has the wrong dtype or shape, or is unknown to the architecture:
    silently ignoring a bias or a scale would give wrong outputs.
    """
    opened = [BlockWeights(tensors, of_part) for of_part in specs]
    for part, weights in zip(model_parts(config), opened, strict=True):
        part.check(weights)
    known = {name for weights in opened for name in weights.names}
    _report_left_out(config, tensors)
    ignored = (*config.ignored, *config.head.ignored, *(pattern for _, pattern in _left_out(config)))
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
    rope = config.embedding.learned(embedding, config.rope)
    return ModelFiles(replace(config, dtype=dtype, rope=rope), tensors, embedding, layers, head)


def _left_out(config: ModelConfig) -> list[tuple[str, str]]:
    patterns = config.mtp.left_out if config.mtp is not None else ()
    return [*(("multi-token prediction", pattern) for pattern in patterns), *config.left_out]


def _report_left_out(config: ModelConfig, tensors: TensorSource) -> None:
    for part, pattern in _left_out(config):
        names = [name for name in tensors if fnmatch(name, pattern)]
        if names:
            num_bytes = sum(tensors.entry(name).num_bytes for name in names)
            why = "is read with the first picture" if part == VISION_TOWER else "is not run"
            _log.info(
                "%s: %s %s; left out: %d tensors %s, %.2f GB",
                tensors.where, part, why, len(names), pattern, num_bytes / 1e9,
            )  # fmt: skip
