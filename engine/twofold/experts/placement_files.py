"""Placements in files: our npz, which is also statistics of ones and zeros; and what `--cache-state` has written."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Final

import numpy as np

from twofold.api.errors import ConfigError
from twofold.experts.expert_statistics import write_statistics
from twofold.experts.placement import Mask

_MAGIC: Final = b"TWFCACH1"
_HEADER: Final = struct.Struct("<8s3i28sQ")  # engine/core/cache_store.cpp
_MAX_CELLS: Final = 1 << 22


def read_placement(path: str | Path) -> tuple[Mask, str]:
    """[layers, experts], and what the file is: "placement", "cache state", or "statistics" of a file that only counts
    (the mask is empty then).

    Raises:
        ConfigError: it is none of these, or broken.
    """
    path = Path(path)
    if path.suffix == ".pt":
        return np.zeros((0, 0), np.bool_), "statistics"
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                return _read_cache_state(path), "cache state"
        with np.load(path, allow_pickle=False) as archive:
            if "resident" not in archive.files:
                return np.zeros((0, 0), np.bool_), "statistics"
            found = np.asarray(archive["resident"])
    except (OSError, EOFError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); what twofold placement export has written, statistics (.npz, .pt) or "
            "what --cache-state has written was expected"
        ) from None
    if found.ndim != 2 or found.dtype.kind not in "bu" or found.size > _MAX_CELLS:
        raise ConfigError(
            f"{path}: 'resident' is {found.dtype} of shape {found.shape}; expected bytes (layers, experts)"
        )
    return found.astype(np.bool_), "placement"


def write_placement(path: str | Path, mask: Mask, model: str) -> None:
    """Write an npz, whole or not at all. Raises ConfigError."""
    if Path(path).suffix != ".npz":
        raise ConfigError(f"{path} given; the name of a placement's file ends in .npz")
    write_statistics(path, mask.astype(np.int64), model=model, resident=mask.astype(np.uint8))


def _read_cache_state(path: Path) -> Mask:
    data = path.read_bytes()
    if len(data) >= _HEADER.size:
        _, layers, experts, *_ = _HEADER.unpack_from(data)
        cells = layers * experts
        if layers > 0 and experts > 0 and cells <= _MAX_CELLS and len(data) >= _HEADER.size + 16 * cells:
            resident = np.frombuffer(data, "<f8", cells, _HEADER.size + 8 * cells)
            return np.asarray(resident.reshape(layers, experts) > 0)
    raise ConfigError(f"{path}: ends early or has a damaged header; it is no cache state")
