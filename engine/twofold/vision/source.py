"""Whether a model reads pictures, and from which files."""

from __future__ import annotations

from pathlib import Path

from twofold.api.errors import ConfigError
from twofold.api.picture_config import PictureConfig, parse_processor_settings
from twofold.models.config import reads_pictures
from twofold.models.model_files import ModelFiles
from twofold.models.picture_encoder import find_projector, vision_source
from twofold.models.registry import family_named
from twofold.vision.service import PictureSource
from twofold.weights.gguf_file import is_gguf


def picture_source(
    config: PictureConfig, model: Path, files: ModelFiles, *, threads: int
) -> PictureSource | None:
    """The encoder of a model that reads pictures; None for any other model, and where prompts may have none. Raises
    ConfigError for a --mmproj that the model cannot have."""
    projector = None if config.mmproj is None else Path(config.mmproj).expanduser()
    if projector is not None and not projector.is_file():
        raise ConfigError(f"--mmproj was given {config.mmproj}, which is no file")
    if projector is not None and not is_gguf(model):
        raise ConfigError("--mmproj was given with a model directory; only GGUF models have such a file")
    if not config.takes_pictures:
        return None
    if is_gguf(model) or not _has_encoder(files):
        projector = projector or find_projector(model)
        if projector is None or not _reads_pictures(files):
            return None
    return PictureSource(
        model,
        projector,
        files.config.hidden_size,
        parse_processor_settings(config.mm_processor_kwargs),
        config.vision_device,
        threads,
        config.picture_cache_bytes,
        config.vision_idle_s,
    )


def _reads_pictures(files: ModelFiles) -> bool:
    """Whether the family reads pictures."""
    family = family_named(files.config.architecture)
    return bool(family and family.pictures) and reads_pictures(files.config.layers)


def _has_encoder(files: ModelFiles) -> bool:
    """Whether the family reads pictures, and the files of its directory have the encoder."""
    return _reads_pictures(files) and bool(vision_source(files.config, files.tensors)[1])
