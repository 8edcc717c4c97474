"""A model's picture encoder: which files have it, and what it takes in memory."""

from __future__ import annotations

import json
import math
import shutil
import struct
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

from twofold.api.errors import ModelLoadError
from twofold.api.picture_config import PictureConfig, parse_vision_device
from twofold.api.projector_names import preferred_projector
from twofold.api.whole_file import whole_file
from twofold.models.config import ModelConfig
from twofold.weights.checkpoint import Checkpoint, read_header
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.tensor_source import TensorEntry, TensorSource

VISION_TOWER: Final = "vision tower"
"""Name of the part that encodes pictures, in `ModelConfig.left_out`."""
VISION_FILE: Final = "vision.safetensors"
"""The picture encoder of a quantised or packed directory, as the checkpoint stores it."""
_PIECE_BYTES: Final = 16 * 2**20
_PROCESS_BYTES: Final = 600 * 2**20
"""Memory of the encoder's process beside its weights: the interpreter with torch and transformers, and activations."""
_CUDA_BYTES: Final = 1024 * 2**20
"""GPU memory of that process beside its weights: the CUDA context and activations. No GPU has shown it yet."""


def find_projector(model: Path) -> Path | None:
    """The projector beside a GGUF file, or in a directory that was quantised or packed from one; of several, BF16 is
    preferred to F32, F16, Q8_0 and other types, in this order.

    A hub's cache may have the model in a folder of its own, and the projector at the top of the repository.
    """
    folders = [model]
    if is_gguf(model):
        above = model.parent.parent
        folders = [model.parent, *([above] if above.parent.name == "snapshots" else [])]
    for folder in folders:
        try:
            found = preferred_projector(path.name for path in folder.iterdir() if path.is_file())
        except OSError:
            continue
        if found is not None:
            return folder / found
    return None


def vision_source(config: ModelConfig, tensors: TensorSource) -> tuple[TensorSource, list[str]]:
    """The tensors of the picture encoder and their names: of a checkpoint, or of `VISION_FILE` beside one that was
    quantised or packed. No names for a GGUF model, whose projector has them."""
    if (file := _folder(tensors) / VISION_FILE).is_file() and not is_gguf(tensors.where):
        entries = read_header(file)
        return TensorSource(tensors.where, entries), list(entries)
    patterns = [pattern for part, pattern in config.left_out if part == VISION_TOWER]
    if not patterns:  # a text model may have 100,000 names
        return tensors, []
    return tensors, [name for name in tensors if any(fnmatch(name, pattern) for pattern in patterns)]


def open_vision_source(config: ModelConfig, folder: Path) -> tuple[TensorSource, list[str]]:
    """`vision_source` of a model directory, with the names of its files. Raises ModelLoadError for damaged files."""
    beside = vision_source(config, TensorSource(folder, {}))
    return beside if beside[1] else vision_source(config, Checkpoint.open(folder))


def encoder_elements(config: ModelConfig, tensors: TensorSource) -> int:
    """Weights of the picture encoder, in the checkpoint or in a projector; 0: there is none."""
    source, names = vision_source(config, tensors)
    if names or (projector := find_projector(_model(tensors))) is None:
        return sum(math.prod(source.entry(name).shape) for name in names)
    return sum(math.prod(entry.shape) for entry in GgufFile.open(projector).tensors.values())


def write_vision_file(config: ModelConfig, source: Path, output: Path) -> None:
    """Write the picture encoder of a model beside the same model quantised or packed; nothing if it has none.

    Raises ModelLoadError for a damaged source, OSError.
    """
    if (projector := find_projector(source)) is not None:
        shutil.copyfile(projector, output / projector.name)
        return
    if is_gguf(source) or not any(part == VISION_TOWER for part, _ in config.left_out):
        return
    tensors, names = open_vision_source(config, source)
    if not names:
        return
    entries = [tensors.entry(name) for name in names]
    header: dict[str, Any] = {}
    for entry, end in zip(entries, accumulate(entry.num_bytes for entry in entries), strict=True):
        offsets = [end - entry.num_bytes, end]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with whole_file(output / VISION_FILE) as part, part.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for entry in entries:
            _copy(entry, stream)


def _copy(entry: TensorEntry, stream: BinaryIO) -> None:
    """Append a tensor's bytes. Raises ModelLoadError if its file is too short."""
    with entry.file.open("rb") as stored:
        stored.seek(entry.offset)
        left = entry.num_bytes
        while left:
            piece = stored.read(min(left, _PIECE_BYTES))
            if not piece:
                raise ModelLoadError(f"{entry.file}: ends within tensor {entry.name}; download it again")
            stream.write(piece)
            left -= len(piece)


def _folder(tensors: TensorSource) -> Path:
    return tensors.where if tensors.where.is_dir() else tensors.where.parent


def _model(tensors: TensorSource) -> Path:
    """The GGUF file or the directory."""
    return tensors.where if is_gguf(tensors.where) else _folder(tensors)


def encoder_bytes(elements: int, config: PictureConfig, device: int | None) -> int:
    """Memory reserved for an encoder of so many weights on a GPU, or on the host (None)."""
    if not config.takes_pictures or parse_vision_device(config.vision_device) != device:
        return 0
    return host_bytes(elements) if device is None else device_bytes(elements)


def host_bytes(elements: int) -> int:
    """Memory of an encoder of so many weights on the CPU, where they are float32; 0: there is none."""
    return 4 * elements + _PROCESS_BYTES if elements else 0


def device_bytes(elements: int) -> int:
    """GPU memory of an encoder of so many weights, which are bfloat16 there; 0: there is none."""
    return 2 * elements + _CUDA_BYTES if elements else 0
