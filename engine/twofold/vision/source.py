"""Whether a model reads pictures, and from which files."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from twofold.api.errors import ConfigError
from twofold.api.picture_config import PictureConfig, parse_processor_settings
from twofold.api.projector_names import preferred_projector
from twofold.models.model_files import ModelFiles
from twofold.models.nested_config import VISION_TOWER
from twofold.vision.service import PictureSource
from twofold.weights.gguf_file import is_gguf


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


def picture_source(
    config: PictureConfig, model: Path, files: ModelFiles, *, threads: int
) -> PictureSource | None:
    """The encoder of a model that reads pictures; None for any other model. Raises ConfigError for a --mmproj that the
    model cannot have."""
    projector = None if config.mmproj is None else Path(config.mmproj).expanduser()
    if projector is not None and not projector.is_file():
        raise ConfigError(f"--mmproj was given {config.mmproj}, which is no file")
    if is_gguf(model):
        projector = projector or find_projector(model)
        if projector is None:
            return None
    elif projector is not None:
        raise ConfigError("--mmproj was given with a model directory; only GGUF models have such a file")
    elif not _has_tower(files):
        return None
    return PictureSource(
        model,
        projector,
        files.config.hidden_size,
        parse_processor_settings(config.mm_processor_kwargs),
        threads,
        config.picture_cache_bytes,
        config.vision_idle_s,
    )


def _has_tower(files: ModelFiles) -> bool:
    patterns = [pattern for part, pattern in files.config.left_out if part == VISION_TOWER]
    return any(fnmatch(name, pattern) for name in files.tensors for pattern in patterns)
