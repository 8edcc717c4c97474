"""A model's picture encoder from its files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from twofold.models.picture_encoder import open_vision_source
from twofold.models.registry import read_config
from twofold.vision.encoder import PictureEncoder
from twofold.vision.mmproj import projector_checkpoint


def open_encoder(model: Path, projector: Path | None, device: str) -> PictureEncoder:
    """The encoder of a model directory, or of a GGUF model with its projector file.

    Raises:
        ConfigError: transformers or pillow is not installed.
        ModelLoadError: the files are damaged, or of a model whose encoder transformers does not know.
    """
    if projector is None:
        return PictureEncoder(model, _vision_tensors(model), device)
    with TemporaryDirectory(prefix="twofold-mmproj-") as folder:
        return PictureEncoder(Path(folder), projector_checkpoint(projector, model, Path(folder)), device)


def _vision_tensors(model: Path) -> dict[str, Tensor]:
    """The directory's vision tensors in float32."""
    source, names = open_vision_source(read_config(model), model)
    return {name: torch.from_numpy(source.vector(name, source.entry(name).shape)) for name in names}
