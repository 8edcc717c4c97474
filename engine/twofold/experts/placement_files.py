"""Placement files: our npz, which is also statistics of ones and zeros; and the files of `--cache-state`."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import numpy as np

from twofold.api.errors import ConfigError
from twofold.api.regular_file import open_regular, read_regular
from twofold.experts.expert_statistics import write_statistics
from twofold.experts.npz_file import read_arrays
from twofold.experts.placement import Mask

_MAGIC: Final = b"TWFCACH1"
_HEADER: Final = struct.Struct("<8s3i28sQ")  # engine/core/cache_store.cpp
_MAX_CELLS: Final = 1 << 22
_MAX_STATE_BYTES: Final = 1 << 28


def read_placement(path: str | Path) -> tuple[Mask, str]:
    """Mask [layers, experts] and the kind of file: "placement", "cache state", or "statistics" for a file with counts
    only (then the mask is empty).

    Raises:
        ConfigError: another kind of file, or broken.
    """
    path = Path(path)
    expected = "expected a file of `twofold placement export`, of --cache-state, or statistics (.npz, .pt)"
    if path.suffix == ".pt":
        return np.zeros((0, 0), np.bool_), "statistics"
    try:
        with open_regular(path) as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                return _read_cache_state(path), "cache state"
        found = read_arrays(path, ("resident",), expected).get("resident")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); {expected}") from None
    if found is None:
        return np.zeros((0, 0), np.bool_), "statistics"
    if found.ndim != 2 or found.dtype.kind not in "bu" or found.size > _MAX_CELLS:
        raise ConfigError(
            f"{path}: 'resident' is {found.dtype} of shape {found.shape}; expected bytes (layers, experts)"
        )
    return found.astype(np.bool_), "placement"


def write_placement(path: str | Path, mask: Mask, model: str) -> None:
    """Write an npz, atomically. Raises ConfigError."""
    if Path(path).suffix != ".npz":
        raise ConfigError(f"{path} given; the name of a placement's file ends in .npz")
    write_statistics(path, mask.astype(np.int64), model=model, resident=mask.astype(np.uint8))


def _read_cache_state(path: Path) -> Mask:
    data, _ = read_regular(path, _MAX_STATE_BYTES)
    if len(data) >= _HEADER.size:
        _, layers, experts, *_ = _HEADER.unpack_from(data)
        cells = layers * experts
        if layers > 0 and experts > 0 and cells <= _MAX_CELLS and len(data) >= _HEADER.size + 16 * cells:
            resident = np.frombuffer(data, "<f8", cells, _HEADER.size + 8 * cells)
            return np.asarray(resident.reshape(layers, experts) > 0)
    raise ConfigError(f"{path}: ends early or has a damaged header; it is not a cache state")
