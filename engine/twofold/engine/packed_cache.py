"""`--packed-cache DIR`: caches a model's panels in a file, made on the first load and memory-mapped afterwards.

The file's name holds the model's fingerprint and the panel layout, so another model or build gets its own file. A cache
that cannot be written or read costs speed but never fails the start.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from twofold import _core
from twofold.api.errors import ConfigError, ModelLoadError
from twofold.blocks import ops
from twofold.blocks.panels import MappedPanels
from twofold.engine.packing import needed_bytes, source_mark, write_panels
from twofold.models.derived_model import check_room
from twofold.models.model_files import ModelFiles, ProgressFn
from twofold.weights.gguf_file import model_name
from twofold.weights.panel_file import SUFFIX, check_if_changed, read_contents
from twofold.weights.panel_writing import PanelFileWriter

_log = logging.getLogger(__name__)


def cached_file(files: ModelFiles, source: Path, directory: Path) -> Path:
    """Path of the cached panels of these files."""
    key = hashlib.sha256(f"{source_mark(files)} {_core.panel_layout()}".encode()).hexdigest()[:24]
    return directory / f"{model_name(str(source)).replace('/', '--')}-{key}{SUFFIX}"


def with_packed_cache(
    files: ModelFiles,
    source: Path,
    directory: Path,
    pool: ops.ThreadPool,
    progress: ProgressFn | None = None,
) -> ModelFiles:
    """`files` with the cache's panels, which are made if missing; unchanged `files` if that fails.

    Raises ModelLoadError for a damaged source.
    """
    if files.mapped is not None:
        _log.info("--packed-cache: %s is packed already and mapped as it is", source)
        return files
    try:
        path = cached_file(files, source, directory)
        found = _open(path, files)
        if found is None:
            directory.mkdir(parents=True, exist_ok=True)
            with PanelFileWriter(path, wait=True) as writer:
                found = _open(path, files)  # by the process that held the lock
                if found is None:
                    check_room(directory, needed_bytes(files, with_rows=False))
                    write_panels(files, writer, source=source, pool=pool, progress=progress, with_rows=False)
                    _log.info("--packed-cache: wrote %s", path)
            found = found or _open(path, files)
    except (OSError, ConfigError) as error:
        _log.warning("--packed-cache %s: %s; the model is loaded without it", directory, error)
        return files
    return files if found is None else files.from_panels(found)


def _open(path: Path, files: ModelFiles) -> MappedPanels | None:
    """The panels at `path`; None if there are none or they are unusable, in which case they are written again."""
    if not path.exists():
        return None
    try:
        contents = read_contents(path)
        if contents.fingerprint != source_mark(files):
            raise ModelLoadError(f"{path}: was packed from another model")
        check_if_changed(path, contents)
        return MappedPanels(path, contents)
    except ModelLoadError as error:
        _log.warning("--packed-cache: %s; writing it again", error)
        return None
