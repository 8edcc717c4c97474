"""Warm start: checks the file of `--cache-state`, and fills slots from it before the first request."""

from __future__ import annotations

import logging
from pathlib import Path

from twofold.api.errors import ConfigError
from twofold.api.regular_file import open_regular
from twofold.experts.moe import MoeRuntime

_log = logging.getLogger(__name__)


def open_cache_state(moe: MoeRuntime, name: str | None) -> Path | None:
    """Fill slots from the file of an earlier run. Returns where to save the cache at the end; None: not saved.

    Raises:
        ConfigError: the file is damaged or another model's, or its folder does not exist.
    """
    if not name:
        return None
    path = Path(name)
    if not moe.num_slots:
        _log.info("--cache-state %s is ignored: accelerator %s has no expert slots", path, moe.choice.label)
        return None
    if not path.parent.is_dir():
        raise ConfigError(f"--cache-state {path}: the folder {path.parent} does not exist; create it first")
    if path.exists():
        try:
            open_regular(path).close()
        except OSError as error:
            raise ConfigError(
                f"--cache-state {path}: cannot be read: {error.strerror}; name another file"
            ) from None
        uploaded = moe.restore_cache(path)
        _log.info("--cache-state %s: %d experts uploaded before the first request", path, uploaded)
    else:
        _log.info(
            "--cache-state %s: does not exist yet; this run starts cold and writes the file at the end", path
        )
    return path
