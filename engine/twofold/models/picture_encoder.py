"""A model's picture encoder: which files have it, and what it takes in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from twofold.api.projector_names import preferred_projector
from twofold.models.config import ModelConfig
from twofold.weights.gguf_file import GgufFile, is_gguf
from twofold.weights.tensor_source import TensorSource

VISION_TOWER: Final = "vision tower"
"""Name of the part that encodes pictures, in `ModelConfig.left_out`."""
_PROCESS_BYTES: Final = 600 * 2**20
"""Memory of the encoder's process beside its weights: the interpreter with torch and transformers, and activations."""
_CUDA_BYTES: Final = 1024 * 2**20
"""GPU memory of that process beside its weights: the CUDA context and activations. No GPU has shown it yet."""


def find_projector(model: Path) -> Path | None:
    """The projector beside a GGUF file; of several, BF16 is preferred to F32, F16, Q8_0 and other types, in this order.

    A hub's cache may have the model in a folder of its own, and the projector at the top of the repository.

    None: there is none, or the model is no GGUF file.
    """
    if not is_gguf(model):
        return None
    above = model.parent.parent
    for folder in (model.parent, *([above] if above.parent.name == "snapshots" else [])):
        try:
            found = preferred_projector(path.name for path in folder.iterdir() if path.is_file())
        except OSError:
            continue
        if found is not None:
            return folder / found
    return None


def vision_names(config: ModelConfig, tensors: TensorSource) -> Iterator[str]:
    """Names of a checkpoint's vision tensors."""
    patterns = [pattern for part, pattern in config.left_out if part == VISION_TOWER]
    return (name for name in tensors if any(fnmatch(name, pattern) for pattern in patterns))


def encoder_elements(config: ModelConfig, tensors: TensorSource) -> int:
    """Weights of the picture encoder, in the checkpoint or beside a GGUF file; 0: there is none."""
    if (projector := find_projector(tensors.where)) is not None:
        return sum(math.prod(entry.shape) for entry in GgufFile.open(projector).tensors.values())
    return sum(math.prod(tensors.entry(name).shape) for name in vision_names(config, tensors))


def host_bytes(elements: int) -> int:
    """Memory of an encoder of so many weights on the CPU, where they are float32; 0: there is none."""
    return 4 * elements + _PROCESS_BYTES if elements else 0


def device_bytes(elements: int) -> int:
    """GPU memory of an encoder of so many weights, which are bfloat16 there; 0: there is none."""
    return 2 * elements + _CUDA_BYTES if elements else 0
