"""Packs a model into a panel file, or into a directory that loads on its own.

Works layer by layer: only the layer being packed is in memory, as panels, and the source's pages are released after it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold import _core
from twofold.api.errors import ConfigError, KernelError, ModelLoadError, TwofoldError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.panels import Matrices
from twofold.experts.packing import make_store, put_layer
from twofold.experts.slot_plan import MoeShape
from twofold.models.derived_model import check_room, fingerprint, source_config, write_tokenizer
from twofold.models.model_files import LoadProgress, ModelFiles, ProgressFn
from twofold.models.sizing import measure_files
from twofold.step.expert_loading import moe_shape
from twofold.weights.gguf_file import model_name
from twofold.weights.panel_file import (
    LARGE_PAGE,
    PAGE,
    PANEL_FILE,
    Contents,
    StoredExperts,
    StoredMatrix,
    StoredTensor,
    read_contents,
)
from twofold.weights.panel_writing import PanelFileWriter
from twofold.weights.tensor_source import scales_name
from twofold.weights.weight_format import LayerFormats, MixedFormats, scale_grid

Rows = npt.NDArray[Any]
_SLACK_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a file besides panels and rows: alignment, contents, tokenizer."""


def source_mark(files: ModelFiles) -> str:
    """The fingerprint of the model that panels are made from."""
    return fingerprint(files, "panels and prediction" if files.config.num_mtp_layers else "panels")


def needed_bytes(files: ModelFiles, *, with_rows: bool) -> int:
    """Disk space that `write_panels` needs, rounded up."""
    size = measure_files(files)
    rows = sum(weights.source_bytes for weights in _dense(files)) if with_rows else 0
    return size.dense_bytes + size.expert_bytes + rows + _SLACK_BYTES


def write_panels(
    files: ModelFiles,
    writer: PanelFileWriter,
    source: Path,
    pool: ops.ThreadPool,
    progress: ProgressFn | None = None,
    *,
    with_rows: bool,
) -> None:
    """Pack all of `files` into `writer`'s file. `with_rows`: also store the rows, so that it loads without the source.

    Raises:
        ModelLoadError: the weights are damaged, or memory is short.
        OSError: the disk is full or fails.
    """
    shape = moe_shape(files)
    matrices = _WrittenPanels(writer)
    config, tensors = files.config, files.tensors
    progress_of = _Progress(files, shape, progress)
    names = [files.dense_names(layer) for layer in range(config.num_layers)]
    for index, layer in enumerate(files.layers):
        for ahead in names[index : index + 3]:
            tensors.will_read(ahead)
        for block, weights in layer:
            if not isinstance(block, ExpertBlock):
                block.cpu(weights.from_panels(matrices), pool, 0)
        tensors.release_pages(names[index])
        progress_of.done(f"layer {index}", writer.at)
    config.head.cpu(files.head.from_panels(matrices), pool)
    embedding = files.embedding.from_panels(matrices)
    config.embedding.cpu(embedding, pool)  # checks the rows, which are never packed
    if config.embedding.layer_inputs is not None:
        config.embedding.layer_inputs.cpu(embedding, pool)
    writer.align(LARGE_PAGE)
    layers = []
    for panels in _expert_panels(files, shape, pool):
        layers.append(writer.write(panels))
        progress_of.done(f"experts of layer {config.moe_layers[len(layers) - 1]}", writer.at)
    experts = StoredExperts(
        shape.num_experts,
        shape.hidden,
        shape.intermediate,
        shape.formats,
        stretches=tuple(layers),
        biases=shape.biases,
        second_half=shape.second_half,
    )
    rows = _write_rows(files, writer) if with_rows else {}
    writer.finish(
        Contents(
            layout=_core.panel_layout(),
            fingerprint=source_mark(files),
            source=model_name(str(source)),
            matrices=matrices.stored,
            experts=experts,
            tensors=rows,
        )
    )


class _WrittenPanels:
    """`Panels` implementation that packs and writes them."""

    def __init__(self, writer: PanelFileWriter) -> None:
        self._writer = writer
        self.stored: dict[str, StoredMatrix] = {}

    def matrix(
        self, pool: ops.ThreadPool, name: str, matrices: Matrices, *, by_head: bool = False
    ) -> ops.PackedMatrix:
        packed = ops.PackedMatrix(pool, matrices())
        self._writer.align(PAGE)
        parts = tuple(zip(packed.formats, packed.segment_rows, strict=True))
        self.stored[name] = StoredMatrix(parts, packed.columns, self._writer.write(packed.panels))
        return packed


def _expert_panels(
    files: ModelFiles, shape: MoeShape, pool: ops.ThreadPool
) -> Iterator[npt.NDArray[np.uint8]]:
    """Expert panels layer by layer, in the layout of one store of all layers."""

    @functools.lru_cache(maxsize=1)  # fresh memory per layer would cost its page faults
    def store_of(formats: LayerFormats) -> _core.ExpertStore:
        return make_store(replace(shape, num_layers=1, formats=(formats,), limits=()), pool)

    try:
        for formats, experts in zip(shape.formats, files.expert_layers(), strict=True):
            store = store_of(formats)
            put_layer(store, pool, 0, experts)
            yield store.panels(0)
    except (ValueError, KernelError) as error:
        raise ModelLoadError(f"experts: {error}; the weights are damaged, download them again") from error
    except MemoryError as error:
        raise ModelLoadError(
            "there is not enough memory for the experts of one layer; end other programs"
        ) from error


def _write_rows(files: ModelFiles, writer: PanelFileWriter) -> dict[str, StoredTensor]:
    """Write the tensors: rows of the dense ones, only shapes of the experts."""
    stored: dict[str, StoredTensor] = {}

    def put(name: str, format: str, shape: tuple[int, ...], data: Rows | None, scales: Rows | None) -> None:
        stored[name] = StoredTensor(format, shape, None if data is None else writer.write_aligned(data))
        if format == "fp8":
            grid = scale_grid(shape) if scales is None else (*shape[:-2], *scales.shape[-2:])
            stretch = None if scales is None else writer.write_aligned(scales)
            stored[scales_name(name)] = StoredTensor("f32", grid, stretch)

    specs = {spec.name: spec.shape for weights in _dense(files) for spec in weights.specs.values()}
    for name, shape in specs.items():
        if len(shape) == 1:
            put(name, "f32", shape, files.tensors.vector(name, (shape[0],)), None)
        else:
            whole = files.tensors.stack(name, shape)
            grids = [matrix.scales for matrix in whole if matrix.scales is not None]
            data = whole[0].data[None] if len(whole) == 1 else np.stack([matrix.data for matrix in whole])
            put(name, whole[0].format, shape, data, np.stack(grids) if grids else None)
        files.tensors.release_pages([name, *files.tensors.companions(name)])
    for block, weights in files.blocks():
        if isinstance(block, ExpertBlock):
            formats = block.expert_formats(weights)
            if isinstance(formats, MixedFormats):
                for part, spec in weights.specs.items():  # a stack has one format
                    put(spec.name, weights.format(part), spec.shape, None, None)
                continue
            for group, own in block.of_one_size(weights):
                for spec, format in zip(group.stacked_experts(own), formats, strict=True):
                    put(spec.name, format, spec.shape, None, None)
            for spec in block.stacked_biases(weights):
                put(spec.name, "f32", spec.shape, None, None)
    return stored


def _dense(files: ModelFiles) -> list[BlockWeights]:
    return [weights for part, weights in files.parts() if not isinstance(part, ExpertBlock)]


class _Progress:
    def __init__(self, files: ModelFiles, shape: MoeShape, progress: ProgressFn | None) -> None:
        self._progress = progress
        self._bytes_total = needed_bytes(files, with_rows=False)
        self._steps_total = files.config.num_layers + shape.num_layers
        self._steps = 0

    def done(self, current: str, num_bytes: int) -> None:
        self._steps += 1
        if self._progress is not None:
            self._progress(
                LoadProgress(
                    "packing",
                    current,
                    num_bytes,
                    self._bytes_total,
                    steps_done=self._steps,
                    steps_total=self._steps_total,
                )
            )


def pack_directory(
    files: ModelFiles,
    source: Path,
    output: Path,
    pool: ops.ThreadPool,
    progress: ProgressFn | None = None,
) -> bool:
    """Write the directory of a packed model; False if it already exists. An interrupted run is started over.

    Raises:
        ConfigError: the directory holds something else, is being written, or its disk has too little room.
        ModelLoadError: the source is damaged, or is a packed model.
        TwofoldError: the disk is full or fails.
    """
    if files.mapped is not None:
        raise ConfigError(f"{source} is packed already; give the model that it was packed from")
    panel_file = output / PANEL_FILE
    config, mark = source_config(source, files.config), source_mark(files)
    try:
        output.mkdir(parents=True, exist_ok=True)
        there = _contents(panel_file)
        if there is not None and there.fingerprint != mark:
            raise ConfigError(
                f"{output} holds {there.source} packed from other files; choose another directory or remove it"
            )
        if there is not None and there.layout == _core.panel_layout() and (output / "config.json").exists():
            return False
        part = output / f"{PANEL_FILE}.part"
        found = sorted(entry.name for entry in output.iterdir())
        if found and not panel_file.exists() and not part.exists():
            raise ConfigError(
                f"{output} holds {found[0]} and no packed model; choose an empty directory or remove it"
            )
        panel_file.unlink(missing_ok=True)  # damaged, or of another layout
        check_room(output, needed_bytes(files, with_rows=True))
        with PanelFileWriter(panel_file) as writer:
            write_tokenizer(source, output, files.config)
            (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            write_panels(files, writer, source=source, pool=pool, progress=progress, with_rows=True)
    except BlockingIOError:
        raise ConfigError(
            f"{output} is being written by another process; wait for it or choose another directory"
        ) from None
    except OSError as error:
        raise disk_error(output, error) from error
    return True


def disk_error(where: Path, error: OSError) -> TwofoldError:
    """The error to raise when a disk cannot take a packed model."""
    return TwofoldError(
        f"{where}: cannot be written: {error.strerror or error}; no partial file is left; free space or choose "
        "another directory, then run the same command again"
    )


def _contents(panel_file: Path) -> Contents | None:
    """Contents of the file; None if it is missing or damaged."""
    try:
        return read_contents(panel_file)
    except ModelLoadError:
        return None
